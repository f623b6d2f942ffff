"""One call of a pass: its transaction, the demands on it, a composition's members, the instruments, its record."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from torch.fx import GraphModule

from fxopt_core.errors import NotReversibleError, PostconditionError, PreconditionError, VetoError
from fxopt_core.graph import check_graph_module
from fxopt_core.ledger.marks import META_KEY
from fxopt_core.ledger.reasons import refusals_text
from fxopt_core.ledger.records import (
    Record,
    Rewrite,
    applied_records,
    ledger_of,
    mark_undone,
    recorded_options,
    set_ledger,
)
from fxopt_core.names import class_path
from fxopt_core.naming import type_text
from fxopt_core.passes.base import Pass, leaves, signature_or_empty
from fxopt_core.passes.instruments import Instrument, InstrumentProtocol, active_instruments
from fxopt_core.passes.run import PassRun, inside, named, new_run, transaction
from fxopt_core.state.copying import faithful_copy
from fxopt_core.state.outline import Outline
from fxopt_core.state.pickling import install_pickling


class Demands(NamedTuple):
    """The demands on a run, as `Transformation.__call__` takes them."""

    expect: int | None = None
    strict: bool = False
    protect_values: bool = False

    def check(self, name: str, records: Sequence[Record]) -> None:
        """Check the records of a run."""
        applied = [record for record in records if record.state == "applied"]
        refused, count = sum(len(each.refusals) for each in applied), sum(len(each.rewrites) for each in applied)
        listed = f"\n{refusals_text(applied)}" if refused else ""
        if self.strict and refused:
            found = f"`{name}` refused {refused} of {refused + count} site{'s' * (refused + count > 1)}"
            raise PreconditionError(f"{found}, and strict=True allows none; nothing was changed:{listed}")
        if self.expect is not None and count != self.expect:
            found = f"`{name}` rewrote {count} site{'s' * (count != 1)}, expected exactly {self.expect}"
            raise PostconditionError(f"{found}; nothing was changed. Refused: {refused}{listed}")


def execute(
    transformation: Pass, graph_module: GraphModule, lint: bool, reverse: bool, demands: Demands
) -> GraphModule:
    """Run a pass, or undo it, as one transaction; see `Transformation.__call__`."""
    check_graph_module(graph_module, f"pass `{transformation.name}`")
    culprits = [each.name for each in leaves(transformation) if not each.reversible]
    if reverse and culprits:
        found = f"pass `{transformation.name}` is not reversible: `{'`, `'.join(culprits)}` cannot be undone"
        raise NotReversibleError(f"{found}. Nothing was changed; keep a copy first", pass_name=transformation.name)
    if transformation._copies:
        graph_module = faithful_copy(graph_module)
    run, known = new_run(transformation, graph_module, reverse=reverse), len(ledger_of(graph_module).records)
    run.protect_values = demands.protect_values
    with transaction(run):
        result = perform(run, run)
        if demands.strict or demands.expect is not None:
            demands.check(run.name, ledger_of(result).records[known:])
        if lint:
            lint_and_recompile(result, transformation)
        # A graph module without a ledger has nothing to lose, and pickles as torch has it.
        if META_KEY in result.meta:
            install_pickling(result)
    return result


def lint_and_recompile(graph_module: GraphModule, transformation: Pass) -> None:
    """Lint a graph and regenerate its code; a broken graph raises a `PostconditionError`."""
    try:
        graph_module.graph.lint()
        if not graph_module.graph.find_nodes(op="output"):
            raise ValueError("it has no output node")
        graph_module.recompile()
    except Exception as error:  # whatever torch finds
        found = f"pass `{transformation.name}` left a broken graph: {error}. Nothing was changed"
        remedy = "insert nodes before those that read them, and erase those that nothing reads, but the output"
        raise PostconditionError(f"{found}; {remedy}") from error


def perform(run: PassRun, root: PassRun) -> GraphModule:
    """Run a pass, or the members of a composition one after the other, within the transaction of ``root``."""
    members, graph_module = run.transformation.members, run.graph_module
    if members is None:
        result, record = observed(run)
        if record is not None and not run.reverse:
            ledger = ledger_of(result)
            next_run = max(ledger.next_run, record.run + 1)
            set_ledger(result, replace(ledger, records=(*ledger.records, record), next_run=next_run))
        return result
    passes = leaves(root.transformation) if run.reverse else []
    for member in reversed(members) if run.reverse else members:
        if member._copies:
            graph_module = faithful_copy(graph_module)
        step = PassRun(member, graph_module, None, run.reverse, run, root.number, protect_values=root.protect_values)
        if member.members is None:
            step.index = next(root.places)
            # An equal pass earlier in the composition has the same signature, and its records are not for this one to
            # take back.
            step.since = step.index if member in passes[: step.index] else 0
        graph_module = perform(step, root)
    return graph_module


def observed(run: PassRun) -> tuple[GraphModule, Record | None]:
    """Run one pass within an open transaction, and let instruments see it, skip it or veto it.

    Returns:
        The result and the record; no record if the pass was skipped. After a veto, the graph module as it was, and a
        record in state "vetoed".
    """
    instruments, seen, veto = active_instruments(), run.graph_module, None
    entered: list[InstrumentProtocol] = []
    runs_module = any(getattr(each, "runs_module", False) for each in instruments)
    # Only a veto needs a snapshot for each pass; errors are rolled back by the snapshot of the outermost call.
    may_veto = any(getattr(type(each), "after_pass", None) is not Instrument.after_pass for each in instruments)
    try:
        if runs_module:
            seen.recompile()  # a run does so at its end only
        if not all(each.should_run(run, seen) for each in instruments):
            return seen, None
        with transaction(run) if may_veto else inside(run):  # only the vetoed pass is rolled back
            for instrument in instruments:
                instrument.before_pass(run, seen)
                entered.append(instrument)
            seen, record = apply_pass(run)
            if runs_module:
                lint_and_recompile(seen, run.transformation)
            while entered:
                # Popped first: an instrument gets either `after_pass` or `after_pass_failed`, never both.
                instrument = entered.pop()
                if instrument.after_pass(run, seen, record) is False:
                    veto = VetoError(f"pass `{run.name}` was vetoed by {type(instrument).__name__}")
                    raise veto
        return seen, record
    except BaseException as error:
        failure = named(error, run)
        for instrument in reversed(entered):
            instrument.after_pass_failed(run, seen, error)
        if error is veto and not run.written:
            error.__traceback__ = None  # its frames hold what was taken back
            return run.graph_module, replace(record, state="vetoed", journal=None, derived=())
        raise failure from failure.__cause__


def apply_pass(run: PassRun) -> tuple[GraphModule, Record]:
    """Call ``transform`` or ``reverse``, and return its result with the record of it."""
    transformation, graph_module, before = run.transformation, run.graph_module, Outline(run.graph_module)
    known, signature = len(ledger_of(graph_module).records), signature_or_empty(transformation)
    marked = bool(signature and transformation.get_transformed_nodes(graph_module))
    taken_back = _to_take_back(run, signature, marked) if run.reverse else []
    # A user's `reverse` may not check whether there is anything to undo. Records and marks show it, unless the pass has
    # no signature to find them by.
    is_idle = run.reverse and transformation._edits and bool(signature) and not taken_back and not marked
    method = "reverse" if run.reverse else "transform"
    started = time.perf_counter()
    with inside(run, editing=True):
        result: object = graph_module if is_idle else getattr(transformation, method)(graph_module)
    seconds = time.perf_counter() - started
    if not isinstance(result, GraphModule):
        found = f"`{method}` of pass `{run.name}` returned {type_text(result)}"
        raise PostconditionError(f"{found}, expected a torch.fx.GraphModule: return the graph module at its end")
    # `GraphModule(graph_module, graph)`, as a pass may return, does not take over `meta`.
    if result is not graph_module and META_KEY not in result.meta and META_KEY in graph_module.meta:
        set_ledger(result, ledger_of(graph_module))
    changed = bool(run.journal) or result is not graph_module or before.changed(result)
    rekeyed, rewrites = False, run.rewrites
    if not rewrites and run.journal is None and signature:  # what a pass has marked counts as its sites
        names = {name for _, _, name, *_ in before.nodes.rows}
        rewrites = [
            Rewrite(site=node.name, before=(node.name,) if node.name in names else (), after=(node.name,))
            for node in transformation.get_transformed_nodes(result)
            if node in run.marked
        ]
    if changed and run.journal is None:  # other names or shapes, for which no record of a called pass accounts
        shapes = before.shapes()
        for each in ledger_of(result).records[known:]:
            shapes = shapes if each.journal is None else each.journal.shapes_after(shapes)
        rekeyed = shapes != Outline(result).shapes()
    record = Record(
        pass_name=run.name,
        transformation=class_path(type(transformation)),
        options=recorded_options(transformation.options),
        signature=signature,
        rewrites=tuple(rewrites),
        refusals=tuple(run.refusals),
        seconds=seconds,
        run=run.number,
        index=run.index,
        reversible=transformation.reversible,
        changed=changed and transformation._edits,
        journal=run.journal,
        derived=tuple(run.derived),
        rekeyed=rekeyed,
    )
    if run.reverse:  # its record says what was taken back, in place of what the reversal itself did
        mark_undone(result, taken_back)
        undone = tuple(rewrite for each in taken_back for rewrite in each.rewrites)
        record = replace(record, state="undone", rewrites=undone, journal=None, derived=())
    return result, record


def _to_take_back(run: PassRun, signature: str, marked: bool) -> list[Record]:
    """Return the records that reversing a pass takes back: all, or the last that changed something, oldest first.

    A pass that core undoes by its journals, or that finds its nodes by their marks, takes back all of its runs. Any
    other takes back one run at a time, such as a pass that multiplies an argument.
    """
    records = applied_records(run.graph_module, signature)
    if not signature:  # such passes are told apart by what a record shows of their options
        shown = class_path(type(run.transformation)), recorded_options(run.transformation.options)
        records = [record for record in records if (record.transformation, record.options) == shown]
    if any(record.journal is not None for record in records):
        return applied_records(run.graph_module, signature, run.since)
    if marked:
        return records
    changed = [place for place, record in enumerate(records) if record.changed]
    return records[changed[-1] :] if changed else records
