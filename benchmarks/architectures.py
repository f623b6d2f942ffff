"""What the pipelines for CPUs do to many architectures: calls, sites and products, and speed beside other engines."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

import torch
from torch.fx import GraphModule

import fxopt
from benchmarks import varied
from benchmarks.apart import Make, Note, Ready, Timed, fastest, rounds_apart
from benchmarks.plans import ENGINES, cells, eager, exported
from benchmarks.suite import Absent, Cell, Row, Settings, Table
from fxopt_core import iter_nodes
from fxopt_cpu.layers.packed_layer import PackedLayer
from fxopt_rewrite import GraphIndex, read_convolution, read_linear

TEXT = """One call of each model in float32. {note} Each engine has a process of its own, and is verified \
before it is timed. Each round takes the fastest call of half a second; speeds are times as fast as eager within \
rounds, and a value whose quartiles are more than 15 % of it apart is not shown. Calls are those of the graph before \
and after `cpu-inference`, sites what its passes rewrote. Products are linear layers and convolutions; packed are \
those of which no plain layer is left, merged those that `merge-linears` joined, and in int8 the packed layers whose \
weights `cpu-inference-int8` rounds."""
FLOATS, INTEGERS = "cpu-inference", "cpu-inference-int8"
COUNTS = ("calls", "sites", "products", "packed", "merged")


def tables(settings: Settings) -> Iterator[Table]:
    """One table with one thread, a row for each architecture."""
    kinds = varied.QUICK if settings.quick else {**varied.PLANS, "More": varied.MORE, "Named": varied.NAMED}
    labels = [label for makers in kinds.values() for label in makers if settings.wants(label)]
    given = replace(settings, threads=1, rounds=settings.fewer_rounds(7))
    columns = ("", "eager, 1 call", *COUNTS, "in int8", FLOATS, INTEGERS, *ENGINES)
    rows = tuple(row(label, given) for label in labels)
    yield Table("Calls, products and speed", columns, rows, TEXT.format(note=given.note))


def row(label: str, settings: Settings) -> Row:
    """Measure one architecture in all engines, and count what became of it."""
    makes: dict[str, Make] = {"eager": partial(eager, label)}
    makes |= {pipeline: partial(counted, label, pipeline) for pipeline in (FLOATS, INTEGERS)}
    makes |= {engine: partial(exported, label, engine) for engine in ENGINES}
    found = rounds_apart({name: partial(fastest, make) for name, make in makes.items()}, settings)
    seconds, *speeds = cells(found)
    notes = [each.note if isinstance(each, Timed) else {} for each in (found[FLOATS], found[INTEGERS])]
    counts: list[Cell] = [notes[0].get(name, "-") for name in COUNTS]
    return Row(label, (seconds, *counts, notes[1].get("in int8", "-"), *speeds))


def counted(label: str, pipeline: str) -> Ready | Absent:
    """The model after a pipeline, if it computes what the model does, with what the pipeline did as its note."""
    given = varied.made(label)
    if isinstance(given, Absent):
        return given
    model, args = given
    before = fxopt.capture(model, args)
    found = fxopt.optimize(model, args, pipeline=pipeline, verify=False)
    if not fxopt.verify(model, found, args):
        return Absent("wrong results")
    return Ready(partial(found, *args), note_of(before, found))


def note_of(before: GraphModule, found: GraphModule) -> Note:
    """Return the counts of a graph before and after a pipeline, as a table shows them."""
    products, kept, rewrites = products_of(before), products_of(found), fxopt.history(found)
    packed = [module for module in found.modules() if isinstance(module, PackedLayer)]
    integers = [each for each in packed if any(tensor.dtype is torch.int8 for tensor in each.buffers())]
    merging = [rewrite for record in rewrites if record.pass_name == "merge-linears" for rewrite in record.rewrites]
    merged = products & {name for rewrite in merging for name in rewrite.before}
    calls = [sum(node.op.startswith("call_") for node in iter_nodes(each.graph)) for each in (before, found)]
    return {
        "calls": f"{calls[0]} to {calls[1]}",
        "sites": str(sum(len(record.rewrites) for record in rewrites)),
        "products": str(len(products)),
        "packed": share(len(products) - len(kept), len(products)),
        "merged": share(len(merged), len(products)),
        "in int8": share(len(integers), len(packed)),
    }


def products_of(graph_module: GraphModule) -> set[str]:
    """Return the names of plain linear layers and convolutions, those that cannot be read included."""
    index = GraphIndex(graph_module)
    return {
        node.name
        for node in index.nodes
        if read_linear(index, node, transposed=True) is not None or read_convolution(index, node) is not None
    }


def share(part: int, whole: int) -> str:
    """Return a part as a percentage.

    >>> share(2, 3), share(0, 0)
    ('67%', '-')
    """
    return f"{part / whole:.0%}" if whole else "-"
