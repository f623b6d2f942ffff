"""Peak of resident memory and seconds of merging a Llama-like model, and of undoing that, beside optimum's.

`PYTHONPATH=benchmarks python benchmarks/memory.py 3` makes three runs of each, every one in a process of its own; in
between, other runs of other kinds. `--gigabytes 2` is the size of the model. optimum is measured where it is installed
(`pip install --no-deps optimum==2.3.0`).
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

HIDDEN, KEYS, INNER = 2048, 512, 5632


@dataclass(frozen=True)
class Way:
    """One way of merging: whose, in which dtype, and whether someone else holds the model, too."""

    who: str
    dtype: str
    shared: bool = False

    @property
    def name(self) -> str:
        """What stands in the table."""
        return f"{self.who}, {self.dtype}{', model kept, share_storage=True' if self.shared else ''}"


WAYS = (
    Way("fxopt", "float32"),
    Way("fxopt", "bfloat16"),
    Way("fxopt", "float32", shared=True),
    Way("optimum", "float32"),
    Way("optimum", "bfloat16"),
)


@dataclass(frozen=True)
class Cost:
    """What one run took; memory in sizes of the model, above the process without one."""

    seconds: float
    processor_seconds: float
    peak: float
    after: float
    undo_seconds: float | None = None
    undo_peak: float | None = None
    undo_after: float | None = None


class Layer(nn.Module):
    """A layer of a decoder as far as its linear layers and their inputs go."""

    def __init__(self, hidden: int, keys: int, inner: int, dtype: torch.dtype) -> None:
        super().__init__()

        def linear(inputs: int, outputs: int) -> nn.Linear:
            return nn.Linear(inputs, outputs, bias=False, device="meta", dtype=dtype)

        self.q, self.k, self.v = linear(hidden, hidden), linear(hidden, keys), linear(hidden, keys)
        self.o = linear(hidden, hidden)
        self.gate, self.up, self.down = linear(hidden, inner), linear(hidden, inner), linear(inner, hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Use every linear layer, without attention."""
        x = x + self.o(self.q(x) * self.k(x).mean() + self.v(x).mean())
        y: Tensor = x + self.down(torch.nn.functional.silu(self.gate(x)) * self.up(x))
        return y


def model_of(size: float, dtype: torch.dtype) -> nn.Module:
    """A model of so many bytes, all of them written."""
    one = sum(parameter.numel() for parameter in Layer(HIDDEN, KEYS, INNER, dtype).parameters()) * dtype.itemsize
    model = nn.Sequential(*(Layer(HIDDEN, KEYS, INNER, dtype) for _ in range(max(1, round(size / one)))))
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.full(parameter.shape, 0.01, dtype=dtype))
    return model.eval()


def run(way: Way, size: float, threads: int) -> Cost:
    """Merge once in this process, and undo it where that is possible."""
    torch.set_num_threads(threads)
    dtype = getattr(torch, way.dtype)
    merge, undo = _merging(way)
    small = nn.Sequential(Layer(8, 4, 8, dtype)).to_empty(device="cpu").eval()
    merge(symbolic_trace(small))  # what is loaded and remembered once is not counted
    base = _memory("VmRSS")
    model: nn.Module | None = model_of(size, dtype)
    assert model is not None
    total = sum(parameter.numel() * parameter.element_size() for parameter in model.parameters())
    graph_module = symbolic_trace(model)
    if not way.shared:
        model = None  # the graph module is the only owner
    gc.collect()

    def measured(function: Callable[[GraphModule], object]) -> tuple[float, float, float, float]:
        _forget_peak()
        started, busy = perf_counter(), process_time()
        function(graph_module)
        seconds, busy = perf_counter() - started, process_time() - busy
        return seconds, busy, (_memory("VmHWM") - base) / total, (_memory("VmRSS") - base) / total

    merged = measured(merge)
    if undo is None:
        return Cost(*merged)
    seconds, _, *memory = measured(undo)
    return Cost(*merged, seconds, *memory)


def _merging(way: Way) -> tuple[Callable[[GraphModule], object], Callable[[GraphModule], object] | None]:
    if way.who == "optimum":
        module: Any = importlib.import_module("optimum.fx.optimization")
        return module.MergeLinears(), None
    from fxopt_core import undo
    from fxopt_linear import MergeLinears

    return MergeLinears(share_storage=way.shared), undo


def _memory(key: str) -> int:
    """Bytes that the kernel tells of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{key}:")) * 1024


def _forget_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def in_a_process(way: Way, size: float, threads: int) -> Cost:
    """Run in a process of its own."""
    task = json.dumps({**asdict(way), "size": size, "threads": threads})
    done = subprocess.run([sys.executable, __file__, "--task", task], capture_output=True, text=True, check=True)
    return Cost(**json.loads(done.stdout.splitlines()[-1]))


def rows(runs: int = 3, gigabytes: float = 2.0, threads: int = 2) -> list[dict[str, Any]]:
    """Medians and spread of each way, all in one shuffled order."""
    there = [way for way in WAYS if way.who != "optimum" or importlib.util.find_spec("optimum") is not None]
    found: dict[Way, list[Cost]] = {way: [] for way in there}
    order = [way for way in there for _ in range(runs)]
    random.shuffle(order)
    for way in order:
        found[way].append(in_a_process(way, gigabytes * 1e9, threads))
    return [{"way": way.name, "runs": len(costs), **_summary(costs)} for way, costs in found.items()]


def _summary(costs: Sequence[Cost]) -> dict[str, Any]:
    seconds = [cost.seconds for cost in costs]
    summary: dict[str, Any] = {"seconds": median(seconds), "seconds_range": (min(seconds), max(seconds))}
    for key in ("processor_seconds", "peak", "after", "undo_seconds", "undo_peak", "undo_after"):
        values = [value for cost in costs if (value := getattr(cost, key)) is not None]
        summary[key] = max(values) if values and "peak" in key else median(values) if values else None
    return summary


_SHOWN = ("processor_seconds", "peak", "after", "undo_seconds", "undo_peak")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table, or make one run for the process that does."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="?", type=int, default=3, help="of each")
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the model")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--task", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.task is not None:
        task = json.loads(options.task)
        size, threads = task.pop("size"), task.pop("threads")
        print(json.dumps(asdict(run(Way(**task), size, threads))))
        return
    print("| merging | seconds | processor seconds | peak / size | after / size | undo, seconds | undo, peak / size |")
    print("|---|---|---|---|---|---|---|")
    for row in rows(options.runs, options.gigabytes, options.threads):
        cells = ["{:.2f} ({:.2f} to {:.2f})".format(row["seconds"], *row["seconds_range"])]
        cells += ["-" if row[key] is None else f"{row[key]:.3f}" for key in _SHOWN]
        print(f"| {row['way']} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
