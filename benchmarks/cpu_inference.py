"""Inference of convolutional models: fxopt's pipeline `cpu-inference` beside every peer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

from benchmarks.folding import compared
from benchmarks.models import CONVOLUTIONAL, SMALL
from benchmarks.runners import INFERENCE
from benchmarks.suite import Settings, Table

_TWICE = "eager, a copy"


def tables(settings: Settings) -> Iterator[Table]:
    """A table for each model, and one with two threads of which one shares its core with another program."""
    models = SMALL if settings.quick else CONVOLUTIONAL
    for name, maker in models.items():
        yield compared(name, maker, INFERENCE, settings)
    name, maker = next(iter(models.items()))
    ways = {way: runner for way, runner in INFERENCE.items() if way != _TWICE and "folded" not in way}
    with busy_core():
        table = compared(name, maker, ways, replace(settings, threads=2))
    text = f"{table.text} Another program keeps one of the cores busy."
    yield replace(table, title=f"{name}, one core busy", text=text)


@contextmanager
def busy_core() -> Iterator[None]:
    """Let another process compute without pause on one core, which this process may use too."""
    core = max(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None
    pin = "" if core is None else f"import os; os.sched_setaffinity(0, {{{core}}})\n"
    process = subprocess.Popen([sys.executable, "-c", f"{pin}while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()
