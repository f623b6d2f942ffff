"""Seconds of passes on large graphs, beside those of checking a graph and generating its code, and beside optimum's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from time import process_time
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

import fxopt
from benchmarks.peers import optimum
from benchmarks.suite import Absent, Cell, Measured, Row, Settings, Table, Task, shuffled_once

SIZES = (1_000, 10_000, 50_000)
COLUMNS = ("graph", "nodes", "lint and recompile", "fxopt", "fxopt / lint and recompile", "optimum", "optimum / fxopt")
TEXT = """Graphs of tiny layers, so that the time is that of the graph. A pass is called without lint and recompile; \
fxopt's time has its checks, its snapshot for a rollback and its records in it. Processor seconds: all of this is done \
by one thread. In a **hub**, one value has as many users as the graph has layers. {rounds} rounds, and fewer on large \
graphs."""


@dataclass(frozen=True)
class Subject:
    """A pass and a kind of graph.

    Attributes:
        name: of the pass, as in both libraries.
        build: makes a graph module of about so many nodes.
        label: what the graph is made of.
    """

    name: str
    build: Callable[[int], GraphModule]
    label: str


class Builder:
    """Builds a graph module node by node."""

    def __init__(self) -> None:
        self.graph = Graph()
        self.modules: dict[str, nn.Module] = {}
        self.x = self.graph.placeholder("x")

    def layer(self, name: str, module: nn.Module, x: Node) -> Node:
        """Call a new module."""
        self.modules[name] = module
        return self.graph.call_module(name, (x,))

    def function(self, function: Callable[..., object], *arguments: Any) -> Node:
        """Call a function."""
        return self.graph.call_function(function, arguments)

    def done(self, output: Node) -> GraphModule:
        """Return the graph module, with shapes."""
        self.graph.output(output)
        root = nn.Module()
        for name, module in self.modules.items():
            parent, _, own = name.partition(".")
            if parent not in root._modules:
                root.add_module(parent, nn.Module())
            root.get_submodule(parent).add_module(own, module)
        return GraphModule(root.eval(), self.graph).eval()


def attention(nodes: int) -> GraphModule:
    """Groups of three linear layers on one input, in a chain."""
    builder = Builder()
    x = builder.x
    for index in range(nodes // 6):
        q, k, v = (builder.layer(f"block{index}.{name}", nn.Linear(4, 4), x) for name in "qkv")
        x = builder.function(torch.add, builder.function(torch.add, q, k), builder.function(torch.relu, v))
    return builder.done(x)


def hub(nodes: int) -> GraphModule:
    """Linear layers that all have one input, and a chain of additions."""
    builder = Builder()
    found = [builder.layer(f"block.q{index}", nn.Linear(4, 4), builder.x) for index in range(nodes // 2)]
    total = found[0]
    for each in found[1:]:
        total = builder.function(torch.add, total, each)
    return builder.done(total)


def convolutions(nodes: int) -> GraphModule:
    """Convolutions, each with a batch norm and an activation."""
    builder = Builder()
    x = builder.x
    for index in range(nodes // 3):
        convolution = builder.layer(f"block{index}.conv", nn.Conv2d(2, 2, 1, bias=False), x)
        norm = builder.layer(f"block{index}.norm", nn.BatchNorm2d(2), convolution)
        x = builder.function(torch.relu, norm)
    return builder.done(x)


def biases(nodes: int) -> GraphModule:
    """Linear layers with a bias, each with an activation."""
    builder = Builder()
    x = builder.x
    for index in range(nodes // 2):
        x = builder.function(torch.relu, builder.layer(f"block{index}.linear", nn.Linear(4, 4), x))
    return builder.done(x)


def divisions(nodes: int) -> GraphModule:
    """Divisions by constants, each with an activation."""
    import operator

    builder = Builder()
    x = builder.x
    for _ in range(nodes // 2):
        x = builder.function(torch.relu, builder.function(operator.truediv, x, 8.0))
    return builder.done(x)


SUBJECTS = (
    Subject("MergeLinears", attention, "query, key and value"),
    Subject("MergeLinears", hub, "hub of linear layers"),
    Subject("FuseBatchNorm2dInConv2d", convolutions, "convolution, norm, activation"),
    Subject("FuseBiasInLinear", biases, "linear, activation"),
    Subject("ChangeTrueDivToMulByInverse", divisions, "division, activation"),
)


def tables(settings: Settings) -> Iterator[Table]:
    """A table for each pass."""
    passes = dict.fromkeys(subject.name for subject in SUBJECTS)
    for name in passes:
        rows = []
        for subject in (each for each in SUBJECTS if each.name == name):
            for size in (60,) if settings.quick else SIZES:
                rows.append(row_of(subject, size, settings))
        yield Table(name, COLUMNS, tuple(rows), TEXT.format(rounds=settings.fewer_rounds(9)))


def row_of(subject: Subject, size: int, settings: Settings) -> Row:
    """One kind of graph, of one size."""
    most = 9 if size < 5_000 else 5 if size < 20_000 else 3
    makers: dict[str, Callable[[], Task]] = {
        "checks": partial(checking, subject, size),
        "fxopt": partial(passing, getattr(fxopt, subject.name), subject, size),
    }
    peer = optimum()
    theirs: Absent | None = peer if isinstance(peer, Absent) else None
    # On a hub, what optimum does is not linear, and would take as long as all the rest.
    if subject.build is hub and size > SIZES[1]:
        theirs = Absent("not tried")
    if theirs is None:
        makers["optimum"] = partial(passing, getattr(peer, subject.name), subject, size)
    rounds, warm_up = settings.fewer_rounds(most), int(size < 5_000)
    seconds = shuffled_once(makers, rounds, warm_up=warm_up, clock=process_time, seed=settings.seed)
    return Row(subject.label, (len(subject.build(size).graph.nodes), *cells(seconds, theirs)))


def cells(seconds: Mapping[str, tuple[float, ...]], theirs: Absent | None) -> tuple[Cell, ...]:
    """Times and ratios."""
    checks, ours = seconds["checks"], seconds["fxopt"]
    found = (Measured.of(checks), Measured.of(ours), Measured.ratio(ours, checks))
    if theirs is not None:
        return (*found, theirs, theirs)
    return (*found, Measured.of(seconds["optimum"]), Measured.ratio(seconds["optimum"], ours))


def checking(subject: Subject, size: int) -> Task:
    """Check the graph and generate its code."""
    graph_module = subject.build(size)

    def check() -> None:
        graph_module.graph.lint()
        graph_module.recompile()

    return check


def passing(cls: Any, subject: Subject, size: int) -> Task:
    """Run a pass without checking and generating."""
    graph_module = fxopt.infer_shapes(subject.build(size), torch.zeros(SHAPES[subject.build]))
    return lambda: cls()(graph_module, lint_and_recompile=False)


SHAPES: Mapping[Callable[[int], GraphModule], tuple[int, ...]] = {
    attention: (1, 4),
    hub: (1, 4),
    convolutions: (1, 2, 1, 1),
    biases: (1, 4),
    divisions: (1, 4),
}
