"""What folding batch norm gains: by hand, by fxopt, and by the peers that fold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.apart import Ready, Timed, rounds_apart
from benchmarks.models import CONVOLUTIONAL, SMALL, Maker, batch_norm_mlp
from benchmarks.runners import FOLDING, Runner
from benchmarks.suite import Absent, Cell, Measured, Row, Settings, Table, Task

COLUMNS = ("", "one call", "times as fast as eager", "largest relative error")
TEXT = """One input of {size}, float32. {note} Each row has a process of its own."""


def tables(settings: Settings) -> Iterator[Table]:
    """A table for each model."""
    models: dict[str, Maker] = {"MLP with batch norm, hidden size 256": batch_norm_mlp}
    if settings.quick:
        models = {"MLP with batch norm, hidden size 8": partial(batch_norm_mlp, 8, 2), **SMALL}
    else:
        models |= {name: CONVOLUTIONAL[name] for name in ("MobileNetV2", "ResNet-50", "EfficientNet-Lite0")}
    for name, maker in models.items():
        yield compared(name, maker, FOLDING, settings)


def compared(name: str, maker: Maker, runners: Mapping[str, Runner], settings: Settings) -> Table:
    """The ways to run one model, in the same rounds, each in a process of its own."""
    makes = {way: partial(prepared, maker, runner) for way, runner in runners.items()}
    found = rounds_apart(makes, settings)
    eager = found["eager"]
    rows = tuple(Row(way, cells(timed, eager, "error")) for way, timed in found.items())
    text = "" if isinstance(eager, Absent) else TEXT.format(size=eager.note["size"], note=settings.note)
    return Table(name, COLUMNS, rows, text)


def prepared(maker: Maker, runner: Runner) -> Ready | Absent:
    """A model run in one way, and the error of its output."""
    subject = maker()
    if isinstance(subject, Absent):
        return subject
    model, x = subject
    expected = model(x)
    task = runner(model, x)
    size = " x ".join(map(str, x.shape))
    return Ready(task, {"error": f"{relative_error(expected, task):.1e}", "size": size})


def cells(timed: Timed | Absent, eager: Timed | Absent, note: str) -> tuple[Cell, ...]:
    """The seconds of a call, times as fast as eager, and a note."""
    if isinstance(timed, Absent):
        return (timed,) * 3
    return Measured.of(timed.seconds), eager if isinstance(eager, Absent) else timed.ratio(eager), timed.note[note]


def relative_error(expected: Tensor, task: Task) -> float:
    """The largest error of a task's output, relative to the largest element."""
    with torch.no_grad():
        found = task()
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        raise ValueError(f"expected a tensor of {tuple(expected.shape)}, found {type(found).__name__}")
    error: float = ((found - expected).abs().max() / expected.abs().max()).item()
    return error
