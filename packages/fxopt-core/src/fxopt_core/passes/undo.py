"""Undo what was applied to a graph module: by the ledger, or by the pass's own `reverse`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch.fx import GraphModule

from fxopt_core.errors import NotReversibleError, PreconditionError, UndoError
from fxopt_core.graph import check_graph_module, iter_nodes
from fxopt_core.ledger.marks import forget_ids, has_mark, tag_of
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
from fxopt_core.passes.call import apply_pass, as_undone, lint_and_recompile as check_and_compile, observed
from fxopt_core.passes.run import PassRun, editing_run, new_run, transaction
from fxopt_core.passes.transformation import ReversibleTransformation
from fxopt_core.state.pickling import install_pickling


def undo(graph_module: GraphModule, lint_and_recompile: bool = True) -> GraphModule:
    """Undo the last run that changed a graph module: a pass, or a whole composition.

    Instruments see each pass as a run in reverse, last first. A run is undone as a whole, so it is an error if an
    instrument skips or vetoes a pass.

    Args:
        graph_module: the module; it is edited in place.
        lint_and_recompile: whether to check the graph and to generate its code anew afterwards.

    Returns:
        The same graph module. Where there is nothing to undo, nothing is changed.

    Raises:
        NotReversibleError: One of the passes of that run is not reversible.
        UndoError: The graph module has since been changed in a way that makes undoing impossible.
        VetoError: An instrument skipped or vetoed one of the passes; nothing was changed.

    >>> import torch
    >>> undo(torch.fx.symbolic_trace(torch.nn.ReLU())).code.strip().splitlines()[-1]
    '    return relu'
    """
    check_graph_module(graph_module, "undo")
    records = [r for r in ledger_of(graph_module).records if r.state == "applied" and r.changed]
    last = [record for record in records if record.run == records[-1].run]
    if not last:
        _check_not_lost(graph_module)
        return graph_module
    for record in last:
        if not record.reversible:
            found = f"pass `{record.pass_name}` cannot be undone, and it belongs to the last run; nothing was changed"
            remedy = "Keep a copy of the graph module before such a pass (compose(..., inplace=False))"
            raise NotReversibleError(f"{found}. {remedy}", pass_name=record.pass_name)

    run = new_run(RecordedPass(Record("undo", "", (), "")), graph_module, reverse=True)
    with transaction(run):
        for record in reversed(last):
            if not any(each is record for each in ledger_of(graph_module).records):
                continue  # a pass that called it has undone it
            step = PassRun(_pass_of(record), graph_module, record.index, tuple(run.ran), True, run, run.number)
            graph_module, _ = observed(step, partial(_undo_step, step, record), as_a_whole=True)
            run.ran.append(record.pass_name)
        if lint_and_recompile:
            check_and_compile(graph_module, run.transformation)
        install_pickling(graph_module)
    return graph_module


def _undo_step(run: PassRun, record: Record) -> tuple[GraphModule, Record]:
    """Undo one record by its journal, or by its pass; return the result and the record of undoing it."""
    if record.journal is None:
        return apply_pass(run)
    started = time.perf_counter()
    _take_back(run.graph_module, [record])
    seconds = time.perf_counter() - started
    return run.graph_module, replace(as_undone(record, (record,)), refusals=(), seconds=seconds, run=run.number)


def undo_pass(graph_module: GraphModule, signature: str) -> GraphModule:
    """Undo all applied records of the pass with this signature, last first; nothing is changed where there is none."""
    run = editing_run(graph_module)
    records = applied_records(graph_module, signature, 0 if run is None else run.since)
    if not any(record.journal or record.has_lost_edits for record in records):
        _check_not_lost(graph_module, signature)
        return graph_module
    _take_back(graph_module, records)
    return graph_module


@torch.inference_mode(False)  # new parameters are to be written and trained anywhere
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
        if tag_of(node).id is not None and (signature is None or has_mark(node, signature)):
            found = f"node `{node.name}` was rewritten, and this graph module has no ledger that says how"
            remedy = "If it was made from another one's graph, copy that one's ledger: `new.meta.update(old.meta)`"
            raise UndoError(f"cannot undo: {found}. Nothing was changed. {remedy}")


def _pass_of(record: Record) -> ReversibleTransformation:
    """Return a pass equal to the one that made a record, or, where a journal says how to undo it, a stand-in."""
    # The record may be a stranger's: its name selects among the passes that are there, and nothing is imported by it.
    cls: Any = known_class(record.transformation)
    for provide in providers if cls is None and record.journal is None else ():
        provide()  # imports the plugins
        cls = known_class(record.transformation)
    found = f"its class {record.transformation} has not been imported"
    if cls is not None:
        try:
            transformation = cls(**dict(record.options))
            if isinstance(transformation, ReversibleTransformation) and transformation.signature == record.signature:
                return transformation
            found = "its pass has options that a record cannot hold"
        except Exception as error:
            found = f"its pass cannot be made from its record ({error})"
    if record.journal is None:
        raise undo_error(record.pass_name, found, "import the module that has it, or reverse it by the pass itself")
    return RecordedPass(record)


class RecordedPass(ReversibleTransformation):
    """Stand-in for a recorded pass that cannot be created here, for example because it is not installed.

    It has the pass's name, options and signature, so it equals the pass, and undoes what the ledger has journals for.

    >>> RecordedPass(Record("fold", "elsewhere:Fold", (("times", 2),), "a1b2")).name
    'fold'
    """

    def __init__(self, record: Record) -> None:
        self._record = record

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Raise a `PreconditionError`: a record cannot be applied."""
        found = f"only its record is left, and no class {self._record.transformation}"
        remedy = "Install the package that has it, and make the pass anew"
        raise PreconditionError(f"pass `{self.name}` cannot be applied: {found}. {remedy}", pass_name=self.name)

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undo all that an equal pass did to a graph module, as far as its records say how."""
        if editing_run(graph_module) is None:
            return self(graph_module, lint_and_recompile=False, reverse=True)
        return undo_pass(graph_module, self.signature)

    @property
    def name(self) -> str:
        """The name in the record."""
        return self._record.pass_name

    @property
    def options(self) -> Mapping[str, object]:
        """The options in the record, with text for values that are not plain data."""
        return MappingProxyType(dict(self._record.options))

    @property
    def signature(self) -> str:
        """The signature in the record; a `TypeError` where the pass had none."""
        if not self._record.signature:
            raise TypeError(f"pass `{self.name}` had options without a stable value, and hence no signature")
        return self._record.signature
