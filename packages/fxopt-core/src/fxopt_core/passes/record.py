"""The record of one run of one pass: what it rewrote, what it refused, and whether it changed anything."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from torch.fx import GraphModule

from fxopt_core.graph import iter_nodes
from fxopt_core.ledger.marks import META_KEY, has_mark
from fxopt_core.ledger.records import Record, Rewrite, ledger_of
from fxopt_core.names import class_path, is_plain_data
from fxopt_core.passes.base import Pass
from fxopt_core.passes.run import PassRun
from fxopt_core.state.outline import Outline


def signature_or_empty(transformation: Pass) -> str:
    """Return a signature, or "" for a pass whose options have no stable value."""
    try:
        return transformation.signature
    except TypeError:
        return ""


def marked_names(graph_module: GraphModule, signature: str) -> set[str]:
    """Return the names of the nodes that a pass with this signature has marked."""
    return {node.name for node in iter_nodes(graph_module.graph) if META_KEY in node.meta and has_mark(node, signature)}


def _is_rekeyed(before: Outline, result: GraphModule, known: int) -> bool:
    """Return whether tensors have other names or shapes, for which no record of a pass that was called accounts."""
    shapes = before.shapes()
    for record in ledger_of(result).records[known:]:
        shapes = shapes if record.journal is None else record.journal.shapes_after(shapes)
    return shapes != Outline(result).shapes()


def make_record(
    run: PassRun, result: GraphModule, signature: str, before: Outline, known: int, marked_before: Collection[str]
) -> Record:
    """Return the record of a pass that is over; ``known`` is how many records there were before it."""
    transformation = run.transformation
    changed = bool(run.journal) or result is not run.graph_module or before.changed(result)
    rewrites = run.rewrites
    if not rewrites and run.journal is None and signature:
        rewrites = _marked_rewrites(result, run, signature, before.names(), marked_before)
    return Record(
        pass_name=run.name,
        transformation=class_path(type(transformation)),
        options=_recorded_options(transformation),
        signature=signature,
        rewrites=tuple(rewrites),
        refusals=tuple(run.refusals),
        seconds=run.seconds,
        run=run.number,
        index=run.index,
        reversible=transformation.reversible,
        changed=changed and transformation._edits,
        journal=run.journal,
        derived=tuple(run.derived),
        rekeyed=changed and run.journal is None and _is_rekeyed(before, result, known),
    )


def _marked_rewrites(
    result: GraphModule, run: PassRun, signature: str, names: Collection[str], marked_before: Collection[str]
) -> list[Rewrite]:
    """Return one rewrite for each node that a pass marked in this run."""
    return [
        Rewrite(site=node.name, before=(node.name,) if node.name in names else (), after=(node.name,))
        for node in iter_nodes(result.graph)
        if has_mark(node, signature) and (node in run.marked or node.name not in marked_before)
    ]


def _own_records(graph_module: GraphModule, transformation: Pass) -> list[Record]:
    """Return the records of an equal pass that are not undone, oldest first."""
    signature = signature_or_empty(transformation)
    path, options = class_path(type(transformation)), _recorded_options(transformation)
    return [
        record
        for record in ledger_of(graph_module).records
        if record.state == "applied" and record.signature == signature
        # Passes without a signature are told apart by what a record shows of their options.
        if signature or (record.transformation, record.options) == (path, options)
    ]


def _recorded_options(transformation: Pass) -> tuple[tuple[str, object], ...]:
    options = transformation.options.items()
    return tuple((name, value if is_plain_data(value) else repr(value)) for name, value in options)


def to_take_back(run: PassRun, graph_module: GraphModule, marked: Collection[str]) -> list[Record]:
    """Return the records that reversing a pass takes back: all, or the last that changed something.

    Core undoes all that it finds in the ledger, and what marks its nodes finds all of those. What does neither takes
    back one run at a time (an argument that each run multiplies).
    """
    records = list(filter(run.undoes, _own_records(graph_module, run.transformation)))
    if marked or any(record.journal is not None for record in records):
        return records
    changed = [place for place, record in enumerate(records) if record.changed]
    return records[changed[-1] :] if changed else records


def as_undone(record: Record, taken_back: Sequence[Record]) -> Record:
    """Return the record of a reversal: what was taken back, in place of what the reversal itself did."""
    rewrites = tuple(rewrite for each in taken_back for rewrite in each.rewrites)
    return replace(record, state="undone", rewrites=rewrites, journal=None, derived=())
