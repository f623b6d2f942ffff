"""Seconds that `capture` takes beside ``torch.export.export`` alone, architecture by architecture.

`nox -s benchmarks -- 15` makes fifteen runs of each, and so does `PYTHONPATH=tests python benchmarks/capture.py 15`.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import logging
import random
from collections.abc import Callable, Sequence
from statistics import median, quantiles
from time import process_time
from typing import Any

import torch
import transformers
from architectures import ARCHITECTURES, Architecture, Inputs
from torch import nn
from torch.export import Dim

from fxopt_capture import capture

CHOSEN = ("BERT", "GPT-2", "Llama", "Gemma 2", "T5", "ViT", "ResNet", "MobileNetV2", "Whisper")
Task = Callable[[], object]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="?", type=int, default=9, help="of each, for each architecture")
    parser.add_argument("--only", nargs="*", default=CHOSEN, help="names of architectures")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    chosen = [architecture for architecture in ARCHITECTURES if architecture.name in options.only]
    seconds = measured([task for architecture in chosen for task in tasks_of(architecture)], options.runs)
    print("| architecture | `torch.export` | capture | ratio |\n|---|---|---|---|")
    for index, architecture in enumerate(chosen):
        print(row(architecture.name, *seconds[2 * index : 2 * index + 2]))


def tasks_of(architecture: Architecture) -> tuple[Task, Task]:
    """Export and capture of the same call, with the same dimensions dynamic."""
    model, example = architecture.build(transformers), architecture.example(2, 8)
    kwargs: dict[str, Any] = {**example, **constants(model)}
    shapes = {**dynamic_shapes(example), **dict.fromkeys(constants(model))}
    return (
        lambda: torch.export.export(model, (), kwargs, dynamic_shapes=shapes, strict=False),
        lambda: capture(model, kwargs=kwargs),
    )


def constants(model: nn.Module) -> dict[str, Any]:
    """No caches, which ``torch.export`` alone does not know."""
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def dynamic_shapes(example: Inputs) -> dict[str, Any]:
    """The batch, and for text the length."""
    texts = ("input_ids", "mask")
    return {name: dict.fromkeys(range(1 + name.endswith(texts)), Dim.AUTO) for name in example}


def measured(tasks: Sequence[Task], runs: int) -> list[list[float]]:
    """Processor seconds of each task, after one run that is not counted; the order is another in every round."""
    seconds: list[list[float]] = [[] for _ in tasks]
    order = list(range(len(tasks)))
    for _ in range(runs + 1):
        random.shuffle(order)
        for index in order:
            gc.collect()
            started = process_time()
            tasks[index]()
            seconds[index].append(process_time() - started)
    return [found[1:] for found in seconds]


def row(name: str, export: Sequence[float], captured: Sequence[float]) -> str:
    """One line: medians with their quartiles, and the ratio of the medians."""
    return f"| {name} | {shown(export)} | {shown(captured)} | {median(captured) / median(export):.2f} |"


def shown(seconds: Sequence[float]) -> str:
    """Median and quartiles."""
    low, middle, high = quantiles(seconds, n=4)
    return f"{middle:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    main()
