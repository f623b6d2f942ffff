"""What merging linear layers gains and costs: separate against merged products, and seconds of the merge itself."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from benchmarks.decoding import MEDIUM, TINY, Shape, decoder
from benchmarks.peers import optimum
from benchmarks.suite import (
    Absent,
    Cell,
    Measured,
    Row,
    Seconds,
    Settings,
    Table,
    Task,
    shuffled_once,
    shuffled_rounds,
    tried,
)
from fxopt_core import undo
from fxopt_linear import MergeLinears

BATCHES = (1, 8, 32)
Mode = Callable[[GraphModule, Tensor], Task]


def tables(settings: Settings) -> Iterator[Table]:
    """Run time, then the seconds of merging and undoing."""
    yield run_time(settings)
    yield transform_time(settings)


def run_time(settings: Settings) -> Table:
    """Decoding one token with separate and merged projections."""
    shape = TINY if settings.quick else MEDIUM
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        for batch in BATCHES[:1] if settings.quick else BATCHES:
            for name, mode in modes_of(batch).items():
                seconds = decoding(shape, batch, dtype, mode, settings)
                label = f"{str(dtype).removeprefix('torch.')}, batch {batch}, {name}"
                rows.append(Row(label, cells(seconds)))
    text = RUN_TEXT.format(**vars(shape), note=settings.note)
    columns = (
        "decoding a token",
        "separate",
        "fxopt merged",
        "separate / fxopt",
        "separate / optimum",
        "separate / itself",
    )
    return Table("Merged against separate on the CPU", columns, tuple(rows), text)


def decoding(shape: Shape, batch: int, dtype: torch.dtype, mode: Mode, settings: Settings) -> Seconds | Absent:
    """Seconds of a call: separate, separate again, and merged by each."""
    x = torch.randn(batch, 1, shape.width, dtype=dtype)
    torch.compiler.reset()
    makers = {"separate": separate, "itself": separate, "fxopt": merged, "optimum": merged_by_optimum}
    tasks: dict[str, Task] = {}
    for name, maker in makers.items():
        task = tried(partial(started, mode, maker, Decoder(shape, batch, dtype), x))
        if isinstance(task, Absent):
            if name in ("separate", "fxopt"):
                return task
            continue
        tasks[name] = task
    return shuffled_rounds(tasks, settings.rounds, clock=settings.clock, seed=settings.seed)


def cells(seconds: Seconds | Absent) -> tuple[Cell, ...]:
    """Times, and ratios to the separate products."""
    if isinstance(seconds, Absent):
        return (seconds,) * 5
    separate_seconds = seconds["separate"]
    ratios: list[Cell] = [
        Measured.ratio(separate_seconds, seconds[name]) if name in seconds else Absent("failed or not installed")
        for name in ("fxopt", "optimum", "itself")
    ]
    return (Measured.of(separate_seconds), Measured.of(seconds["fxopt"]), *ratios)


@dataclass(frozen=True)
class Decoder:
    """A decoder for this many sequences."""

    shape: Shape
    batch: int = 1
    dtype: torch.dtype = torch.float32


def separate(of: Decoder) -> GraphModule:
    """The trace as it is."""
    return torch.fx.symbolic_trace(decoder(of.shape, of.batch, of.dtype))


def merged(of: Decoder) -> GraphModule:
    """Merged by fxopt, in two groups for each layer."""
    return MergeLinears()(separate(of), expect=2 * of.shape.layers)


def merged_by_optimum(of: Decoder) -> GraphModule:
    """Merged by optimum."""
    found: GraphModule = optimum().MergeLinears()(separate(of))
    return found


def started(mode: Mode, maker: Callable[[Decoder], GraphModule], of: Decoder, x: Tensor) -> Task:
    """Make a graph module, and a function that calls it."""
    return mode(maker(of), x)


def modes_of(batch: int) -> dict[str, Mode]:
    """The ways to run a graph module; compiled, which takes minutes, for one sequence only."""
    return {"eager": eager, "torch.compile": compiled} if batch == 1 else {"eager": eager}


def eager(graph_module: GraphModule, x: Tensor) -> Task:
    """Operation by operation."""
    return lambda: graph_module(x)


def compiled(graph_module: GraphModule, x: Tensor) -> Task:
    """By inductor, for this size."""
    program = torch.compile(graph_module, dynamic=False)
    return lambda: program(x)


def transform_time(settings: Settings) -> Table:
    """Seconds of merging and of undoing, in memory that is there."""
    shape = TINY if settings.quick else MEDIUM
    peer = optimum()
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        of = Decoder(shape, dtype=dtype)
        makers = {"fxopt": partial(merging, MergeLinears(), of), "undo": partial(undoing, of)}
        if not isinstance(peer, Absent):
            makers["optimum"] = partial(merging, peer.MergeLinears(), of)
        seconds = shuffled_once(makers, settings.fewer_rounds(15), clock=settings.clock, seed=settings.seed)
        theirs: tuple[Cell, Cell] = (peer, peer)
        if "optimum" in seconds:
            theirs = (Measured.of(seconds["optimum"]), Measured.ratio(seconds["optimum"], seconds["fxopt"]))
        ours = (Measured.of(seconds["fxopt"]), Measured.of(seconds["undo"]))
        rows.append(Row(str(dtype).removeprefix("torch."), (*ours, *theirs)))
    parameters = sum(parameter.numel() for parameter in decoder(shape, 1).parameters())
    columns = ("dtype", "fxopt", "fxopt, undoing", "optimum", "optimum / fxopt")
    return Table(
        "Seconds of merging", columns, tuple(rows), TRANSFORM_TEXT.format(millions=parameters / 1e6, note=settings.note)
    )


def merging(transformation: Any, of: Decoder) -> Task:
    """Merge, lint and recompile."""
    graph_module = separate(of)
    return lambda: transformation(graph_module)


def undoing(of: Decoder) -> Task:
    """Undo, lint and recompile."""
    graph_module = merged(of)
    return lambda: undo(graph_module)


RUN_TEXT = """A decoder of {layers} layers of width {width}, MLP {inner}, {heads} heads of queries and {groups} of \
keys and values, one token for each sequence, {cached} positions in the cache. Query, key and value are merged, and \
gate and up. Above 1, the merged model is faster. The last column compares the separate model with a copy of itself: \
smaller differences are noise. {note}"""
TRANSFORM_TEXT = """The same decoder with {millions:.0f} million parameters, merged in place, linted and recompiled. \
Making the model is not counted. {note}"""
