"""Undo what was applied to a graph module: by the ledger, or by the pass's own `reverse`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch.fx import GraphModule

from fxopt_core.errors import NotReversibleError, UndoError
from fxopt_core.graph import check_graph_module, iter_nodes
from fxopt_core.ledger.marks import forget_ids, tag_of
from fxopt_core.ledger.records import (
    Memo,
    Record,
    applied_records,
    find_ledger,
    ledger_of,
    mark_undone,
    set_ledger,
    undo_error,
)
from fxopt_core.names import known_class, providers
from fxopt_core.passes.base import Pass
from fxopt_core.passes.call import apply_pass, lint_and_recompile as check_and_compile
from fxopt_core.passes.run import PassRun, editing_run, named, new_run, transaction
from fxopt_core.passes.transformation import ReversibleTransformation
from fxopt_core.state.pickling import install_pickling


def undo(graph_module: GraphModule, lint_and_recompile: bool = True) -> GraphModule:
    """Undo the last run that changed a graph module: a pass, or a whole composition.

    Instruments see nothing of it but the passes that are undone by a `reverse` of their own, if they call others.

    Args:
        graph_module: the module; it is edited in place.
        lint_and_recompile: whether to check the graph and to generate its code anew afterwards.

    Returns:
        The same graph module. Where there is nothing to undo, nothing is changed.

    Raises:
        NotReversibleError: One of the passes of that run is not reversible.
        UndoError: The graph module has since been changed in a way that makes undoing impossible.

    >>> import torch
    >>> undo(torch.fx.symbolic_trace(torch.nn.ReLU())).code.strip().splitlines()[-1]
    '    return relu'
    """
    check_graph_module(graph_module, "undo")
    records = [r for r in ledger_of(graph_module).records if r.state == "applied" and r.changed]
    # Passes of one composition share the number of their run. Without records, the condition is never evaluated.
    last = [record for record in records if record.run == records[-1].run]
    if not last:
        _check_not_lost(graph_module)
        return graph_module
    for record in last:
        if not record.reversible:
            found = f"pass `{record.pass_name}` cannot be undone, and it belongs to the last run; nothing was changed"
            raise NotReversibleError(f"{found}. Keep a copy from before such a pass", pass_name=record.pass_name)

    run = new_run(_Undo(), graph_module, reverse=True)
    with transaction(run):
        for record in reversed(last):
            if not any(each is record for each in ledger_of(graph_module).records):
                continue  # a pass that called it has undone it
            transformation = _pass_of(record) if record.journal is None else run.transformation
            step = PassRun(transformation, graph_module, record.index, True, run, run.number)
            try:
                if record.journal is None:
                    graph_module, _ = apply_pass(step)
                else:
                    _take_back(graph_module, [record])
            except Exception as error:
                raise named(error, step)  # noqa: B904  # it has its cause
        if lint_and_recompile:
            check_and_compile(graph_module, run.transformation)
        install_pickling(graph_module)
    return graph_module


class _Undo(Pass):
    """What a run of `undo` is named after in errors."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


def undo_pass(graph_module: GraphModule, signature: str) -> GraphModule:
    """Undo all applied records of the pass with this signature, last first; nothing is changed where there is none."""
    run = editing_run(graph_module)
    records = applied_records(graph_module, signature, 0 if run is None else run.since)
    if not any(record.journal or record.has_lost_edits for record in records):
        _check_not_lost(graph_module, signature)
        return graph_module
    _take_back(graph_module, records)
    return graph_module


@torch.inference_mode(False)  # what it makes is to be written and trained anywhere
@torch.no_grad()
def _take_back(graph_module: GraphModule, records: Sequence[Record]) -> None:
    """Take back the journals of records, last first; after an error the graph module is half undone.

    With the last journal of the ledger, the numbers of nodes go.
    """
    taken, later, memo = {id(record) for record in records}, list[Record](), Memo()
    for record in reversed(ledger_of(graph_module).records):
        if id(record) not in taken:
            later += [record] * (record.state == "applied")
        elif record.has_lost_edits:  # to take it back would change nothing, and report success
            found = "its record names what it replaced, but has lost the edits: something else changed the ledger"
            raise undo_error(record.pass_name, found, "use a copy whose ledger is intact")
        elif record.journal:
            dependent = record.journal.dependent(each.journal for each in later if each.journal is not None)
            if dependent is not None:
                name = next(each.pass_name for each in later if each.journal is dependent)
                found = f"pass `{name}` ran after it and builds on its result"
                raise undo_error(record.pass_name, found, f"undo `{name}` first")
            record.journal.take_back(graph_module, record.pass_name, memo)
    for finish in memo.values():
        finish()
    mark_undone(graph_module, records)
    ledger = ledger_of(graph_module)
    if not any(record.journal and record.state == "applied" for record in ledger.records):
        forget_ids(iter_nodes(graph_module.graph))
        set_ledger(graph_module, replace(ledger, next_id=0))


def _check_not_lost(graph_module: GraphModule, signature: str | None = None) -> None:
    """Refuse a graph module that has lost its ledger but has nodes that a recorded pass (or this one) rewrote."""
    if find_ledger(graph_module) is not None:
        return
    for node in iter_nodes(graph_module.graph):
        if tag_of(node).id is not None and (signature is None or signature in tag_of(node).marks):
            found = f"node `{node.name}` was rewritten, and this graph module has no ledger that says how"
            raise UndoError(f"cannot undo: {found}; copy that of the original: `new.meta.update(old.meta)`")


def _pass_of(record: Record) -> ReversibleTransformation:
    """Return a pass equal to the one that made a record."""
    # The record may be a stranger's: its name selects among the passes that are there, and nothing is imported by it.
    cls: Any = known_class(record.transformation)
    for provide in providers if cls is None else ():
        provide()  # imports the plugins
        cls = known_class(record.transformation)
    with suppress(Exception):  # there is no such class, or it does not take what a record can hold of its options
        made: object = cls(**dict(record.options))
        if isinstance(made, ReversibleTransformation) and made.signature == record.signature:
            return made
    found = f"no equal pass can be made of the class {record.transformation} and the options in the record"
    raise undo_error(record.pass_name, found, "import the module that has it, or reverse it by the pass itself")
