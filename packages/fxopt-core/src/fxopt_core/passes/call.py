"""One call of a pass: its transaction, the demands on it, a composition's members, the instruments, its record."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

from torch.fx import GraphModule

from fxopt_core.errors import NotReversibleError, PassError, PostconditionError, PreconditionError, VetoError, halted_by
from fxopt_core.graph import check_graph_module
from fxopt_core.ledger.marks import META_KEY
from fxopt_core.ledger.reasons import refusals_text
from fxopt_core.ledger.records import Record, adopt_records, append_record, ledger_of, mark_undone, set_ledger
from fxopt_core.naming import type_text
from fxopt_core.passes.base import Pass, Reversible, leaves
from fxopt_core.passes.context import Frame, Run, composing_run, current_frame, frame_open, run_open
from fxopt_core.passes.instruments import (
    InstrumentProtocol,
    PassRun,
    active_instruments,
    current_run,
    inside,
    report,
    report_failure,
)
from fxopt_core.passes.record import as_undone, make_record, marked_names, signature_or_empty, to_take_back
from fxopt_core.state.copying import faithful_copy
from fxopt_core.state.outline import Outline
from fxopt_core.state.snapshot import Snapshot
from fxopt_core.travel import pickling


@dataclass(frozen=True)
class Demands:
    """What a run is told to demand of its result."""

    expect: int | None = None
    strict: bool = False
    protect_values: bool = False

    def check_direction(self, name: str, reverse: bool) -> None:
        """Check that the demands on a pass make sense, and that nothing is demanded of a reversal."""
        if self.expect is not None and (type(self.expect) is not int or self.expect < 0):
            found = f"`{name}` is told to expect {self.expect!r} sites, expected a number from 0"
            raise PreconditionError(found, pass_name=name)
        if reverse and (self.strict or self.expect is not None):
            raise PreconditionError(
                f"`{name}` is to be reversed, and expect and strict are demands on applying it: leave them away; a "
                "reversal that does not fit is an error in any case",
                pass_name=name,
            )

    def check(self, name: str, records: Sequence[Record]) -> None:
        """Check the records of a run."""
        applied = [record for record in records if record.state == "applied"]
        refused, count = sum(len(each.refusals) for each in applied), sum(len(each.rewrites) for each in applied)
        listed = f"\n{refusals_text(applied)}" if refused else ""
        if self.strict and refused:
            raise PreconditionError(
                f"`{name}` refused {refused} of {refused + count} site{'s' * (refused + count > 1)}, and strict=True "
                f"allows none; nothing was changed. Fix the sites, or run without strict:{listed}",
                pass_name=name,
            )
        notes = "".join(f"\n  {record.pass_name}: {record.note}" for record in applied if record.note)
        if self.expect is not None and count != self.expect:
            raise PostconditionError(
                f"`{name}` rewrote {count} site{'s' * (count != 1)}, expected exactly {self.expect}; nothing was "
                f"changed. Refused: {refused}{listed}{notes}",
                pass_name=name,
            )


def execute(
    transformation: Pass, graph_module: GraphModule, lint: bool, reverse: bool, demands: Demands
) -> GraphModule:
    """Run a pass, or undo it, as one transaction; see `Transformation.__call__`."""
    check_graph_module(graph_module, f"pass `{transformation.name}`")
    if reverse and not transformation.reversible:
        raise _not_reversible(transformation)
    demands.check_direction(transformation.name, reverse)
    if transformation._copies:
        graph_module = faithful_copy(graph_module)

    def body(run: Run) -> GraphModule:
        known = len(ledger_of(graph_module).records)
        result = run_pass(run, transformation, graph_module, reverse)
        if not reverse:
            demands.check(transformation.name, ledger_of(result).records[known:])
        if lint:
            lint_and_recompile(result, transformation)
        return result

    return in_transaction(transformation, graph_module, demands.protect_values, body)


def _not_reversible(transformation: Pass) -> NotReversibleError:
    culprits = [t.name for t in leaves(transformation) if not t.reversible]
    listed = f": {', '.join(f'`{name}`' for name in culprits)} cannot be undone"
    because = listed if culprits != [transformation.name] else ""
    return NotReversibleError(
        f"pass `{transformation.name}` is not reversible{because}. Nothing was changed; keep a copy of the graph "
        "module before the pass (compose(..., inplace=False)) to return to it",
        pass_name=transformation.name,
    )


def in_transaction(
    transformation: Pass, graph_module: GraphModule, protect_values: bool, body: Callable[[Run], GraphModule]
) -> GraphModule:
    """Return ``body(run)``; if anything raises, restore the graph module and raise a `PassError` with the cause."""
    if any(cls.__name__ == "FSDPModule" for cls in type(graph_module).__mro__):
        text = (
            f"pass `{transformation.name}`: the graph module was given to fully_shard, after which torch cannot "
            "generate its code anew. Rewrite and undo before that"
        )
        raise PreconditionError(text, pass_name=transformation.name)
    handled = sys.exc_info()[1]
    snapshot = Snapshot.take(graph_module, protect_values=protect_values)
    number, total = ledger_of(graph_module).next_run, len(leaves(transformation))
    run = Run(transformation, graph_module, snapshot, number, protect_values, total)
    with run_open(run):
        try:
            result = body(run)
            if META_KEY in result.meta:
                pickling.install(result)
        except BaseException as error:
            _roll_back(snapshot, transformation, halted_by(error, handled) or error)
    del run, snapshot  # which takes a while, and belongs to the transaction
    return result


def _roll_back(snapshot: Snapshot, transformation: Pass, error: BaseException) -> NoReturn:
    written = snapshot.restore()
    note = f" {written_note(written)}" if written else ""
    if isinstance(error, PassError):
        error.pass_name = error.pass_name or transformation.name
        error.args = (f"{error}{note}",) if note else error.args
    if isinstance(error, PassError) or not isinstance(error, Exception):  # an interrupt goes on as it is
        raise error
    raise PassError(
        f"pass `{transformation.name}` failed and was rolled back: {type(error).__name__}: {error}{note}",
        pass_name=transformation.name,
    ) from error


def lint_and_recompile(graph_module: GraphModule, transformation: Pass) -> None:
    """Check a graph, and generate its code anew; a broken graph is a `PostconditionError`."""
    try:
        graph_module.graph.lint()
        graph_module.recompile()
    except Exception as error:  # whatever torch finds
        raise PostconditionError(
            f"pass `{transformation.name}` left a broken graph: {error}. Nothing was changed; insert nodes before "
            "those that read them, and erase those that nothing reads",
            pass_name=transformation.name,
        ) from error


def written_note(names: Sequence[str]) -> str:
    """Return a sentence on tensors whose contents a rollback does not bring back."""
    return (
        f"The pass wrote values in place, which a rollback does not bring back: {', '.join(names)}. Run it with "
        "protect_values=True to have them copied first."
    )


def run_members(composition: Pass, graph_module: GraphModule, *, reverse: bool) -> GraphModule:
    """Run the members of a composition within the open transaction, or, without one, each by itself."""
    run = composing_run(graph_module)
    members = composition.members or ()
    if composition._copies and (run is None or run.transformation is not composition):
        graph_module = faithful_copy(graph_module)
    with inside(PassRun(composition, reverse=reverse, parent=current_run())):
        for member in reversed(members) if reverse else members:
            if run is None:
                graph_module = execute(member, graph_module, False, reverse, Demands())
            else:
                graph_module = run.current = run_pass(run, member, graph_module, reverse)
    return graph_module


def run_pass(run: Run, transformation: Pass, graph_module: GraphModule, reverse: bool) -> GraphModule:
    """Run one pass, or undo it, within an open transaction, under the instruments of this context."""
    if transformation.members is not None:
        return run_members(transformation, graph_module, reverse=reverse)
    index = run.total - 1 - run.started if reverse else run.started
    run.started += 1
    place = index if run.transformation.members is not None else None
    info = PassRun(transformation, place, tuple(run.names), reverse, current_run())
    result, record = observed(run, info, graph_module, lambda: apply_pass(run, info, graph_module))
    if record is None:
        return result
    run.names.append(info.name)
    if not reverse:
        run.records.append(record)
        append_record(result, record)
    return result


def _undoes_from(run: Run, info: PassRun) -> int | None:
    """Return the place of a pass in the composition that is reversed, where one before it equals it.

    Equal passes have one signature. Each is to undo what it did itself, because others may stand between them.
    """
    if not info.reverse or info.index is None or not info.transformation.undone_by_journal:
        return None
    equal = info.transformation in leaves(run.transformation)[: info.index]
    return info.index if equal else None


def observed(
    run: Run,
    info: PassRun,
    graph_module: GraphModule,
    body: Callable[[], tuple[GraphModule, Record]],
    *,
    as_a_whole: bool = False,
) -> tuple[GraphModule, Record | None]:
    """Run one pass within an open transaction, and let instruments see it, skip it or veto it.

    With ``as_a_whole``, to skip or veto the pass is an error: a run is undone as a whole.

    Returns:
        The result and the record that ``body`` returns; no record where the pass was skipped. After a veto, the graph
        module as it was, and a record that says so.
    """
    instruments = active_instruments()
    entered: list[InstrumentProtocol] = []
    seen = graph_module
    try:
        runs_module = any(getattr(instrument, "runs_module", False) for instrument in instruments)
        if runs_module:
            graph_module.recompile()  # a run does so at its end only
        against = [each for each in instruments if not each.should_run(info, graph_module)]  # all are asked
        if against and as_a_whole:
            declined = f"undoing pass `{info.name}` was declined by {type(against[0]).__name__} (should_run)"
            raise _as_a_whole(VetoError(declined, pass_name=info.name, index=info.index))
        if against:
            return graph_module, None
        guard = None
        if not as_a_whole and any(getattr(instrument, "may_veto", True) for instrument in instruments):
            guard = Snapshot.take(graph_module, protect_values=run.protect_values)
        for instrument in instruments:
            instrument.before_pass(info, graph_module)
            entered.append(instrument)
        with inside(info):
            seen, record = body()
        if runs_module:
            lint_and_recompile(seen, info.transformation)
        veto = report(entered, info, seen, record)
        if veto is None:
            return seen, record
        if as_a_whole:
            raise _as_a_whole(veto)
        _take_back(guard, veto)
    except BaseException as error:
        report_failure(entered, info, seen, error)
        if isinstance(error, Exception):
            _raise_named(error, info)
        raise
    return graph_module, replace(record, state="vetoed", journal=None, derived=())


def _as_a_whole(veto: VetoError) -> VetoError:
    message = f"{veto}. undo takes back a run as a whole, so nothing was changed: reverse single passes by "
    message += "transformation(graph_module, reverse=True), or undo without that instrument"
    return VetoError(message, pass_name=veto.pass_name, index=veto.index)


def _take_back(guard: Snapshot | None, veto: VetoError) -> None:
    """Restore what was before a vetoed pass; where that is not possible, the whole run is rolled back."""
    if guard is None:
        raise VetoError(f"{veto}, which core was not prepared for: an instrument that vetoes declares may_veto = True")
    if written := guard.restore():
        raise VetoError(f"{veto}, and cannot be taken back alone. {written_note(written)}")


def _raise_named(error: Exception, info: PassRun) -> NoReturn:
    """Raise an error as a `PassError` that names the pass and its place."""
    if isinstance(error, PassError):
        error.pass_name = error.pass_name or info.name
        error.index = info.index if error.index is None else error.index
        raise error
    before = f" after {', '.join(f'`{name}`' for name in info.before)}" if info.before else ""
    place = f" (pass {info.index} of the composition{before})" if info.index is not None else ""
    raise PassError(
        f"pass `{info.name}`{place} failed, and {'undoing ' * info.reverse}it was rolled back: "
        f"{type(error).__name__}: {error}",
        pass_name=info.name,
        index=info.index,
    ) from error


def transform_by_hand(transformation: Pass, graph_module: GraphModule) -> GraphModule:
    """Call ``transform`` of a pass for somebody who did so himself, and leave its record, so that it can be undone.

    No transaction is opened, and no instrument sees it: what was called is a method, and not the pass.
    """
    check_graph_module(graph_module, f"pass `{transformation.name}`")
    if (frame := current_frame(graph_module)) is not None:
        frame.flush()
    info = PassRun(transformation, parent=current_run())
    with inside(info):
        result, record = _apply(ledger_of(graph_module).next_run, Frame(graph_module), info, graph_module)
    append_record(result, record)
    pickling.install(result)
    return result


def apply_pass(run: Run, info: PassRun, graph_module: GraphModule) -> tuple[GraphModule, Record]:
    """Call ``transform`` or ``reverse``, and return its result with the record of it."""
    return _apply(run.number, Frame(graph_module, undoes_from=_undoes_from(run, info)), info, graph_module)


def _apply(number: int, frame: Frame, info: PassRun, graph_module: GraphModule) -> tuple[GraphModule, Record]:
    transformation, before = info.transformation, Outline(graph_module)
    known, signature = len(ledger_of(graph_module).records), signature_or_empty(transformation)
    marked = marked_names(graph_module, signature)
    taken_back = to_take_back(frame, graph_module, transformation, marked) if info.reverse else []
    started = time.perf_counter()
    # A user's `reverse` may not look whether there is anything to undo. A record or a mark says so, unless the pass has
    # no signature to be found by.
    nothing_to_undo = transformation._edits and bool(signature) and not taken_back and not marked
    result: object = graph_module
    with frame_open(frame):
        if not info.reverse:
            result = transformation.transform(graph_module)
        elif not nothing_to_undo:
            assert isinstance(transformation, Reversible)
            result = transformation.reverse(graph_module)
        frame.flush()
    seconds = time.perf_counter() - started
    if not isinstance(result, GraphModule):
        method = "reverse" if info.reverse else "transform"
        raise PostconditionError(
            f"`{method}` of pass `{info.name}` returned {type_text(result)}, expected a torch.fx.GraphModule: "
            "return the graph module at its end"
        )
    if result is not graph_module and META_KEY not in result.meta and META_KEY in graph_module.meta:
        set_ledger(result, ledger_of(graph_module))
    if len(ledger_of(result).records) > known:  # it called others
        adopt_records(result, known, number)
    record = make_record(info, result, frame, before, known, marked)
    record = replace(record, seconds=seconds, run=number)
    if info.reverse:
        mark_undone(result, to_take_back(frame, result, transformation, marked))
        record = as_undone(record, taken_back)
    return result, record
