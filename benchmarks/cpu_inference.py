"""Inference of convolutional models on the CPU: fxopt's pipeline `cpu-inference` beside every peer."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.folding import compared
from benchmarks.models import CONVOLUTIONAL, SMALL
from benchmarks.runners import INFERENCE
from benchmarks.suite import Settings, Table


def tables(settings: Settings) -> Iterator[Table]:
    """A table for each model."""
    for name, maker in (SMALL if settings.quick else CONVOLUTIONAL).items():
        yield compared(name, maker(), INFERENCE, settings)
