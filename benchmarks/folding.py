"""What folding batch norm brings: by hand, by fxopt, and by the peers that fold."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from benchmarks.models import CONVOLUTIONAL, SMALL, Maker, Subject, batch_norm_mlp
from benchmarks.runners import FOLDING, Runner
from benchmarks.suite import Absent, Cell, Measured, Row, Settings, Table, Task, shuffled_rounds, tried

COLUMNS = ("", "one call", "times as fast as eager", "largest relative error")
TEXT = """One input of {size}, float32. {note}"""


def tables(settings: Settings) -> Iterator[Table]:
    """A table for each model."""
    models: dict[str, Maker] = {"MLP with batch norm, hidden size 256": batch_norm_mlp}
    if settings.quick:
        models = {"MLP with batch norm, hidden size 8": partial(batch_norm_mlp, 8, 2), **SMALL}
    else:
        models |= {name: CONVOLUTIONAL[name] for name in ("MobileNetV2", "ResNet-50", "EfficientNet-Lite0")}
    for device in settings.devices:
        for name, maker in models.items():
            yield compared(name, maker(), FOLDING, settings, device)


def compared(
    name: str, subject: Subject | Absent, runners: Mapping[str, Runner], settings: Settings, device: str = "cpu"
) -> Table:
    """The ways to run one model on a device, in the same rounds."""
    title = name if device == "cpu" else f"{name} on a GPU"
    if isinstance(subject, Absent):
        return Table(title, COLUMNS, (Row(title, (subject,) * 3),))
    model, x = subject[0].to(device), subject[1].to(device)
    tasks = {way: tried(partial(runner, model, x)) for way, runner in runners.items()}
    running = {way: task for way, task in tasks.items() if not isinstance(task, Absent)}
    seconds = shuffled_rounds(
        running, settings.rounds, sample_seconds=0.05, clock=settings.clock(device), seed=settings.seed
    )
    with torch.no_grad():
        expected = model(x)
    rows = []
    for way, task in tasks.items():
        cells: tuple[Cell, ...] = (task,) * 3 if isinstance(task, Absent) else ()
        if not isinstance(task, Absent):
            cells = (
                Measured.of(seconds[way]),
                Measured.ratio(seconds["eager"], seconds[way]),
                f"{relative_error(expected, task):.1e}",
            )
        rows.append(Row(way, cells))
    text = TEXT.format(size=" x ".join(map(str, x.shape)), note=settings.note)
    return Table(title, COLUMNS, tuple(rows), text)


def relative_error(expected: Tensor, task: Task) -> float:
    """The largest error of a task's output, relative to the largest element."""
    with torch.no_grad():
        found = task()
    if not isinstance(found, Tensor) or found.shape != expected.shape:
        raise ValueError(f"expected a tensor of {tuple(expected.shape)}, found {type(found).__name__}")
    error: float = ((found - expected).abs().max() / expected.abs().max()).item()
    return error
