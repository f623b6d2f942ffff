"""Undo what was applied to a graph module: by the ledger, or by the pass's own `reverse`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

from torch.fx import GraphModule

from fxopt_core.backwards import Backwards, undo_error
from fxopt_core.checks import check_graph_module
from fxopt_core.errors import NotReversibleError, UndoError
from fxopt_core.execution import apply_pass, as_undone, in_transaction
from fxopt_core.graph import iter_nodes
from fxopt_core.instruments import PassRun, active_instruments, current_run, inside
from fxopt_core.known_classes import find_class
from fxopt_core.ledger import Record, applied_records, has_ledger, ledger_of, mark_undone, set_ledger
from fxopt_core.marks import forget_ids, has_mark, tag_of
from fxopt_core.observing import lint_and_recompile as check_and_compile, observed
from fxopt_core.options import construct
from fxopt_core.recorded_pass import RecordedPass
from fxopt_core.runs import Run, current_frame, current_snapshot
from fxopt_core.transaction import Snapshot
from fxopt_core.transformation import ReversibleTransformation, Transformation


def undo(graph_module: GraphModule, lint_and_recompile: bool = True) -> GraphModule:
    """Undo the last run that changed a graph module: a pass, or a whole composition.

    Instruments see each pass of it as a run in reverse, last first. It is undone as a whole, so that one which skips or
    vetoes a pass is an error.

    Args:
        graph_module: the module; it is edited in place.
        lint_and_recompile: whether to check the graph and to generate its code anew afterwards.

    Returns:
        The same graph module. Where there is nothing to undo, nothing is changed.

    Raises:
        NotReversibleError: One of the passes of that run is not reversible.
        UndoError: The graph module was changed since in a way that makes it impossible.
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
            raise NotReversibleError(
                f"pass `{record.pass_name}` cannot be undone, and it belongs to the last run; nothing was changed. "
                "Keep a copy of the graph module before such a pass (compose(..., inplace=False))",
                pass_name=record.pass_name,
            )
    steps = [(record, None if record.operations is not None else _pass_of(record)) for record in reversed(last)]

    def body(run: Run) -> GraphModule:
        with inside(PassRun(run.transformation, reverse=True, parent=current_run())):
            result = _undo_steps(run, graph_module, steps)
        _forget_unused_ids(result)
        if lint_and_recompile:
            check_and_compile(result, run.transformation)
        return result

    return in_transaction(_Undo(), graph_module, False, body)


Step: TypeAlias = "tuple[Record, ReversibleTransformation | None]"
"""A record and the pass that undoes it; None where its operations do."""


def _undo_steps(run: Run, graph_module: GraphModule, steps: Sequence[Step]) -> GraphModule:
    """Undo records one after the other; instruments see each as a run of its pass, in reverse."""
    for record, transformation in steps:
        if not any(each is record for each in ledger_of(graph_module).records):
            continue  # a pass that called it has undone it
        info = _as_run(run, record, transformation)
        step = partial(_undo_step, run, info, graph_module, record)
        graph_module, _ = observed(run, info, graph_module, step, as_a_whole=True)
        run.names.append(record.pass_name)
    return graph_module


def _as_run(run: Run, record: Record, transformation: ReversibleTransformation | None) -> PassRun:
    """Return what instruments are told; a pass is only made for them where there are any."""
    if transformation is None and active_instruments():
        try:
            transformation = _pass_of(record)
        except UndoError:
            transformation = None
    return PassRun(transformation or RecordedPass(record), record.index, tuple(run.names), True, current_run())


def _undo_step(run: Run, info: PassRun, graph_module: GraphModule, record: Record) -> tuple[GraphModule, Record]:
    """Undo one record, by its operations, or by the pass that made it; return the record of that."""
    if record.operations is None:
        return apply_pass(run, info, graph_module)
    started = time.perf_counter()
    Backwards(graph_module, record).run()
    mark_undone(graph_module, (record,))
    undone = as_undone(record, (record,))
    return graph_module, replace(undone, refusals=(), seconds=time.perf_counter() - started, run=run.number)


class _Undo(Transformation):
    """Names the transaction of `undo` in errors."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Return the graph module."""
        return graph_module

    @property
    def name(self) -> str:
        """Return "undo"."""
        return "undo"


def undo_pass(graph_module: GraphModule, signature: str) -> GraphModule:
    """Undo all applied records of the pass with this signature, last first; nothing is changed where there is none."""
    frame = current_frame(graph_module)
    records = [r for r in applied_records(graph_module, signature) if frame is None or frame.undoes(r)]
    if not any(record.operations for record in records):
        _check_not_lost(graph_module, signature)
        return graph_module
    guard = Snapshot.take(graph_module) if current_snapshot(graph_module) is None else None
    try:
        for record in reversed(records):
            Backwards(graph_module, record).run()
    except BaseException:
        if guard is not None:
            guard.restore()
        raise
    mark_undone(graph_module, records)
    _forget_unused_ids(graph_module)
    return graph_module


def _check_not_lost(graph_module: GraphModule, signature: str | None = None) -> None:
    """Check that a graph module without a ledger has no nodes that a record refers to: it was left behind then.

    Raises:
        UndoError: It has; with a signature, nodes that the pass marked.
    """
    if has_ledger(graph_module):
        return
    for node in iter_nodes(graph_module.graph):
        if tag_of(node).id is not None and (signature is None or has_mark(node, signature)):
            raise UndoError(
                f"cannot undo: node `{node.name}` was rewritten, and this graph module has no ledger that says how. A "
                "graph module that is made of another one's graph starts without; take it along by "
                "`new.meta.update(old.meta)`. Nothing was changed"
            )


def _forget_unused_ids(graph_module: GraphModule) -> None:
    ledger = ledger_of(graph_module)
    if not any(record.operations and record.state == "applied" for record in ledger.records):
        forget_ids(iter_nodes(graph_module.graph))
        set_ledger(graph_module, replace(ledger, next_id=0))


def _pass_of(record: Record) -> ReversibleTransformation:
    """Return a pass equal to the one that made a record."""
    try:
        transformation = construct(find_class(record.transformation), dict(record.options))
    except Exception as error:
        found = f"its pass cannot be made from its record ({error})"
        raise undo_error(record, found, "reverse it by the pass itself") from error
    if not isinstance(transformation, ReversibleTransformation) or transformation.signature != record.signature:
        raise undo_error(record, "its pass has options that a record cannot hold", "reverse it by the pass itself")
    return transformation
