"""Memory and seconds of merging a Llama-like model whose weights the graph module alone owns, and of undoing it."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.fx import GraphModule

from benchmarks.decoding import Shape, decoder
from benchmarks.peak_memory import Peak, peak_of
from benchmarks.peers import optimum
from benchmarks.suite import Absent, Cell, Measured, Row, Settings, Table
from fxopt_core import undo
from fxopt_linear import MergeLinears

COLUMNS = ("way", "peak / model", "seconds", "times as long as fxopt")
TEXT = """A decoder of {gigabytes:.2g} GB, query, key and value merged, and gate and up. Each row runs in its own \
process, in random order in each of {rounds} rounds. The peak is resident memory during the pass, lint and recompile \
included, minus that before the model was made. With shared storage, the caller keeps the original parameters as \
views of the merged ones."""
SHARING = "fxopt, sharing storage with the caller's model"
WAYS = ("fxopt", SHARING, "fxopt, undoing", "optimum")
GIGABYTES = 2.0


def tables(settings: Settings) -> Iterator[Table]:
    """A table for each dtype."""
    for dtype in ("float32", "bfloat16"):
        yield measured(dtype, settings)


def measured(dtype: str, settings: Settings) -> Table:
    """All ways to merge, in rounds."""
    rounds, drawn = settings.fewer_rounds(1 if settings.quick else 5), random.Random(settings.seed)
    gigabytes = 0.02 if settings.quick else GIGABYTES
    absent = optimum() if isinstance(optimum(), Absent) else None
    ways = [way for way in WAYS if way != "optimum" or absent is None]
    found: dict[str, list[Peak]] = {way: [] for way in ways}
    for _ in range(rounds):
        for way in drawn.sample(ways, len(ways)):
            found[way].append(peak_of(work_of, way, dtype, gigabytes, threads=settings.threads))
    fastest = [peak.seconds for peak in found["fxopt"]]
    rows = []
    for way in WAYS:
        cells: tuple[Cell, ...] = () if absent is None else (absent,) * 3
        if way in found:
            seconds = [peak.seconds for peak in found[way]]
            sizes = [1 + (peak.highest - peak.before) / size_of(peak) for peak in found[way]]
            cells = (Measured.of(sizes, "x"), Measured.of(seconds), Measured.ratio(seconds, fastest))
        rows.append(Row(way, cells))
    size = size_of(found["fxopt"][0]) / 1e9
    return Table(f"Merging in {dtype}", COLUMNS, tuple(rows), TEXT.format(gigabytes=size, rounds=rounds))


def size_of(peak: Peak) -> float:
    """The bytes of the model, as the work returned them."""
    return float(str(peak.result))


def work_of(way: str, dtype: str, gigabytes: float) -> Callable[[], int]:
    """Make the graph module, which then alone owns its weights; return the work."""
    graph_module = owned(dtype, gigabytes)
    callers = dict(graph_module.named_parameters()) if way == SHARING else {}
    size = sum(tensor.numel() * tensor.element_size() for tensor in graph_module.parameters())
    merge: Any = optimum().MergeLinears() if way == "optimum" else MergeLinears(share_storage=way == SHARING)
    if way == "fxopt, undoing":
        merge(graph_module)
    warm(way)

    def work() -> int:
        undo(graph_module) if way == "fxopt, undoing" else merge(graph_module)
        callers.clear()  # until here, the caller also held the weights
        return size

    return work


def warm(way: str) -> None:
    """Merge a tiny model, so that one-time costs are not measured."""
    small = torch.fx.symbolic_trace(decoder(Shape(16, 32, 2, 2, 1, cached=1), 1))
    if way == "optimum":
        optimum().MergeLinears()(small)
    else:
        undo(MergeLinears(share_storage=way == SHARING)(small))


def owned(dtype: str, gigabytes: float) -> GraphModule:
    """A trace of a decoder with weights, and nothing else that holds them."""
    width, inner = (2048, 5632) if gigabytes > 0.5 else (256, 704)
    layer = 4 * width * width + 3 * width * inner
    layers = max(1, round(gigabytes * 1e9 / (layer * (4 if dtype == "float32" else 2))))
    model = decoder(Shape(width, inner, 16, 16, layers, cached=1), 1, getattr(torch, dtype), "meta")
    model = model.to_empty(device="cpu")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.uniform_(-0.02, 0.02)
    traced = torch.fx.symbolic_trace(model)
    del model
    return traced  # measuring collects garbage, and with it the cycle that the model is in
