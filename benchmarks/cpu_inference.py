"""Inference of convolutional models: fxopt's pipeline `cpu-inference` beside every peer; on a GPU, what runs there."""

from __future__ import annotations

from collections.abc import Iterator

from benchmarks.folding import compared
from benchmarks.models import CONVOLUTIONAL, SMALL
from benchmarks.runners import INFERENCE, INFERENCE_ON_GPU
from benchmarks.suite import Settings, Table


def tables(settings: Settings) -> Iterator[Table]:
    """A table for each model and device."""
    for device in settings.devices:
        runners = INFERENCE if device == "cpu" else INFERENCE_ON_GPU
        for name, maker in (SMALL if settings.quick else CONVOLUTIONAL).items():
            yield compared(name, maker(), runners, settings, device)
