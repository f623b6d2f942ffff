"""Seconds that `capture` takes beside ``torch.export.export`` alone, architecture by architecture."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from time import process_time
from typing import Any

import torch
from torch import nn
from torch.export import Dim

from benchmarks.peers import peer
from benchmarks.suite import Absent, Measured, Row, Settings, Table, Task, shuffled_once
from fxopt_capture import capture

CHOSEN = ("BERT", "GPT-2", "Llama", "Gemma 2", "T5", "ViT", "ResNet", "MobileNetV2", "Whisper")
TEXT = """Small models with random weights, all captured in the same run. CPU time; \
`torch.export` is given the dynamic dimensions that `capture` finds by itself."""


def tables(settings: Settings) -> Iterator[Table]:
    """Measure the chosen architectures in one run."""
    transformers = peer("transformers")
    if isinstance(transformers, Absent):
        yield Table("Export and capture", ("architecture", "all"), (Row("all", (transformers,)),), TEXT)
        return
    # Beside the tests, which are on the path; importing needs transformers.
    from architectures import ARCHITECTURES

    chosen = {each.name: each for each in ARCHITECTURES if each.name in (CHOSEN[:1] if settings.quick else CHOSEN)}
    tasks: dict[str, Task] = {}
    for name, architecture in chosen.items():
        tasks |= tasks_of(name, architecture.build(transformers), architecture.example(2, 8))
    rounds = settings.fewer_rounds(9)
    torch.set_num_threads(1)
    makers = {name: (lambda task=task: task) for name, task in tasks.items()}
    seconds = shuffled_once(makers, rounds, clock=process_time, seed=settings.seed)
    rows = []
    for name in chosen:
        export, captured = (seconds[f"{name} {task}"] for task in ("export", "capture"))
        rows.append(Row(name, (*map(Measured.of, (export, captured)), Measured.ratio(captured, export))))
    columns = ("architecture", "`torch.export`", "capture", "times as long")
    yield Table("Export and capture", columns, tuple(rows), f"{TEXT} {rounds} rounds.")


def tasks_of(name: str, model: nn.Module, example: dict[str, Any]) -> dict[str, Task]:
    """Export and capture of the same call, with the same dimensions dynamic."""
    kwargs: dict[str, Any] = {**example, **constants(model)}
    shapes = {**dynamic_shapes(example), **dict.fromkeys(constants(model))}

    def export() -> object:
        return torch.export.export(model, (), kwargs, dynamic_shapes=shapes, strict=False)

    return {
        f"{name} export": export,
        f"{name} capture": lambda: capture(model, kwargs=kwargs),
    }


def constants(model: nn.Module) -> dict[str, Any]:
    """Turn caches off, which ``torch.export`` alone cannot handle."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def dynamic_shapes(example: dict[str, Any]) -> dict[str, Any]:
    """The batch, and for text the length."""
    texts = ("input_ids", "mask")
    return {name: dict.fromkeys(range(1 + name.endswith(texts)), Dim.AUTO) for name in example}
