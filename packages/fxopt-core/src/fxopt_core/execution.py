"""Calling a pass: its transaction, the demands on it, the members of a composition, its record."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NoReturn

from torch.fx import GraphModule

from fxopt_core import pickling
from fxopt_core.checks import check_graph_module
from fxopt_core.copying import faithful_copy
from fxopt_core.errors import NotReversibleError, PassError, PostconditionError, PreconditionError
from fxopt_core.instruments import PassRun, active_instruments, current_run, inside
from fxopt_core.ledger import Record, adopt_records, append_record, ledger_of, mark_undone, set_ledger
from fxopt_core.marks import META_KEY
from fxopt_core.observing import lint_and_recompile, observed, written_note
from fxopt_core.reasons import refusals_text
from fxopt_core.recording import State, make_record, own_records, signature_or_empty
from fxopt_core.runs import Frame, Run, composing_run, current_frame, frame_open, run_open
from fxopt_core.site_pass import ReversibleSitePass
from fxopt_core.transaction import Snapshot
from fxopt_core.transformation import ReversibleTransformation, Transformation

if TYPE_CHECKING:
    from fxopt_core.compose import Composition


@dataclass(frozen=True)
class Demands:
    """What a run is told to demand of its result."""

    expect: int | None = None
    strict: bool = False
    protect_values: bool = False

    def check_direction(self, transformation: Transformation, reverse: bool) -> None:
        """Check that the demands make sense, and that nothing is demanded of a reversal.

        Raises:
            PreconditionError: ``expect`` is no number of sites, or a demand is given together with ``reverse``.
        """
        if self.expect is not None and (type(self.expect) is not int or self.expect < 0):
            raise PreconditionError(
                f"`{transformation.name}` is told to expect {self.expect!r} sites, expected a number from 0",
                pass_name=transformation.name,
            )
        if reverse and (self.strict or self.expect is not None):
            raise PreconditionError(
                f"`{transformation.name}` is to be reversed, and expect and strict are demands on applying it: leave "
                "them away; a reversal that does not fit is an error in any case",
                pass_name=transformation.name,
            )

    def check(self, transformation: Transformation, records: Sequence[Record]) -> None:
        """Check the records of a run.

        Raises:
            PreconditionError: ``strict``, and a site was refused.
            PostconditionError: Another number of sites than ``expect`` was rewritten.
        """
        applied = [record for record in records if record.state == "applied"]
        refusals = [refusal for record in applied for refusal in record.refusals]
        count = sum(len(record.rewrites) for record in applied)
        listed = f"\n{refusals_text(refusals)}" if refusals else ""
        if self.strict and refusals:
            raise PreconditionError(
                f"`{transformation.name}` refused {len(refusals)} of {len(refusals) + count} sites, and strict=True "
                f"allows none; nothing was changed. Mend the sites, or run without strict:{listed}",
                pass_name=transformation.name,
            )
        if self.expect is not None and count != self.expect:
            raise PostconditionError(
                f"`{transformation.name}` rewrote {count} sites, expected exactly {self.expect}; nothing was changed. "
                f"Refused: {len(refusals)}{listed}",
                pass_name=transformation.name,
            )


def execute(
    transformation: Transformation, graph_module: GraphModule, lint: bool, reverse: bool, demands: Demands
) -> GraphModule:
    """Run a pass, or undo it, as one transaction; see `Transformation.__call__`."""
    from fxopt_core.compose import Composition

    check_graph_module(graph_module, f"pass `{transformation.name}`")
    check_reversible(transformation, reverse)
    demands.check_direction(transformation, reverse)
    if isinstance(transformation, Composition) and not transformation.inplace:
        graph_module = faithful_copy(graph_module)

    def body(run: Run) -> GraphModule:
        known = len(ledger_of(graph_module).records)
        result = run_pass(run, transformation, graph_module, reverse)
        if not reverse:
            demands.check(transformation, ledger_of(result).records[known:])
        if lint:
            lint_and_recompile(result, transformation)
        return result

    return in_transaction(transformation, graph_module, demands.protect_values, body)


def check_reversible(transformation: Transformation, reverse: bool) -> None:
    """Check that a pass that is to be reversed can be.

    Raises:
        NotReversibleError: It cannot; of a composition, the members that cannot are named.
    """
    if not reverse or isinstance(transformation, ReversibleTransformation):
        return
    culprits = [t.name for t in leaves(transformation) if not isinstance(t, ReversibleTransformation)]
    listed = f": {', '.join(f'`{name}`' for name in culprits)} cannot be undone"
    because = listed if culprits != [transformation.name] else ""
    raise NotReversibleError(
        f"pass `{transformation.name}` is not reversible{because}. Nothing was changed; keep a copy of the graph "
        "module before the pass (compose(..., inplace=False)) to return to it",
        pass_name=transformation.name,
    )


def leaves(transformation: Transformation) -> list[Transformation]:
    """Return the passes that a composition comes down to, in order; for any other pass, that one."""
    from fxopt_core.compose import Composition

    if not isinstance(transformation, Composition):
        return [transformation]
    return [leaf for member in transformation.transformations for leaf in leaves(member)]


def in_transaction(
    transformation: Transformation,
    graph_module: GraphModule,
    protect_values: bool,
    body: Callable[[Run], GraphModule],
) -> GraphModule:
    """Return ``body(run)``; if anything raises, restore the graph module and raise a `PassError` with the cause."""
    snapshot = Snapshot.take(graph_module, protect_values=protect_values)
    number, total = ledger_of(graph_module).next_run, len(leaves(transformation))
    run = Run(transformation, graph_module, snapshot, number, protect_values, total)
    with run_open(run):
        try:
            result = body(run)
            if META_KEY in result.meta:
                pickling.install(result)
        except BaseException as error:
            _roll_back(snapshot, transformation, error)
    del run, snapshot  # which takes a while, and belongs to the transaction
    return result


def _roll_back(snapshot: Snapshot, transformation: Transformation, error: BaseException) -> NoReturn:
    written = snapshot.restore()
    note = f" {written_note(written)}" if written else ""
    if isinstance(error, PassError):
        error.pass_name = error.pass_name or transformation.name
        if note:
            error.args = (f"{error}{note}",)
        raise error
    if not isinstance(error, Exception):  # an interrupt goes on as it is
        raise error
    raise PassError(
        f"pass `{transformation.name}` failed and was rolled back: {type(error).__name__}: {error}{note}",
        pass_name=transformation.name,
    ) from error


def run_members(composition: Composition, graph_module: GraphModule, *, reverse: bool) -> GraphModule:
    """Run the members of a composition within the open transaction, or, without one, each by itself."""
    run = composing_run(graph_module)
    members = composition.transformations[::-1] if reverse else composition.transformations
    if not composition.inplace and (run is None or run.transformation is not composition):
        graph_module = faithful_copy(graph_module)
    with inside(PassRun(composition, reverse=reverse, parent=current_run())):
        for member in members:
            if run is None:
                graph_module = member(graph_module, lint_and_recompile=False, reverse=reverse)
            else:
                graph_module = run.current = run_pass(run, member, graph_module, reverse)
    return graph_module


def run_pass(run: Run, transformation: Transformation, graph_module: GraphModule, reverse: bool) -> GraphModule:
    """Run one pass, or undo it, within an open transaction, under the instruments of this context."""
    from fxopt_core.compose import Composition

    if isinstance(transformation, Composition):
        return run_members(transformation, graph_module, reverse=reverse)
    info = _next_pass(run, transformation, reverse)
    result, record = observed(run, info, graph_module, lambda: apply_pass(run, info, graph_module))
    if record is None:
        return result
    run.names.append(info.name)
    if not reverse:
        run.records.append(record)
        append_record(result, record)
    return result


def _next_pass(run: Run, transformation: Transformation, reverse: bool) -> PassRun:
    """Return what is known of the next pass of a run: its place among all passes that the composition comes down to."""
    from fxopt_core.compose import Composition

    index = run.total - 1 - run.started if reverse else run.started
    run.started += 1
    place = index if isinstance(run.transformation, Composition) else None
    return PassRun(transformation, place, tuple(run.names), reverse, current_run())


def _undoes_from(run: Run, info: PassRun) -> int | None:
    """Return the place of a pass in the composition that is reversed, where an equal one of core's stands before it.

    Equal passes have one signature. Each is to undo what it did itself, because others may stand between them.
    """
    if not info.reverse or info.index is None or not isinstance(info.transformation, ReversibleSitePass):
        return None
    equal = info.transformation in leaves(run.transformation)[: info.index]
    return info.index if equal else None


def transform_by_hand(transformation: Transformation, graph_module: GraphModule) -> GraphModule:
    """Call ``transform`` of a pass for somebody who did so himself, and leave its record, so that it can be undone.

    No transaction is opened, and no instrument sees it: what was called is a method, and not the pass.
    """
    check_graph_module(graph_module, f"pass `{transformation.name}`")
    frame = current_frame(graph_module)
    if frame is not None:
        frame.flush()
    info = PassRun(transformation, parent=current_run())
    with inside(info):
        result, record = _apply(
            ledger_of(graph_module).next_run, Frame(graph_module), info, graph_module, State(graph_module)
        )
    append_record(result, record)
    pickling.install(result)
    return result


def apply_pass(run: Run, info: PassRun, graph_module: GraphModule) -> tuple[GraphModule, Record]:
    """Call ``transform`` or ``reverse``, and return its result with the record of it."""
    frame = Frame(graph_module, undoes_from=_undoes_from(run, info))
    first = run.started == 1 and graph_module is run.graph_module and not active_instruments()
    before = State(graph_module, run.snapshot if first else None)
    return _apply(run.number, frame, info, graph_module, before)


def _apply(
    number: int, frame: Frame, info: PassRun, graph_module: GraphModule, before: State
) -> tuple[GraphModule, Record]:
    transformation = info.transformation
    known, signature = len(ledger_of(graph_module).records), signature_or_empty(transformation)
    marked = before.marked(signature)
    taken_back = _to_take_back(frame, graph_module, transformation, marked) if info.reverse else []
    started = time.perf_counter()
    with frame_open(frame):
        if not info.reverse:
            result: object = transformation.transform(graph_module)
        elif _may_have_something_to_undo(transformation, signature, taken_back, marked):
            assert isinstance(transformation, ReversibleTransformation)
            result = transformation.reverse(graph_module)
        else:
            result = graph_module
        frame.flush()
    seconds = time.perf_counter() - started
    if not isinstance(result, GraphModule):
        method = "reverse" if info.reverse else "transform"
        raise PostconditionError(
            f"`{method}` of pass `{info.name}` returned a {type(result).__name__}, expected a torch.fx.GraphModule: "
            "return the graph module at its end"
        )
    if result is not graph_module and META_KEY not in result.meta and META_KEY in graph_module.meta:
        set_ledger(result, ledger_of(graph_module))
    adopt_records(result, known, number)
    record = make_record(transformation, result, frame, before, marked, seconds=seconds, run=number, index=info.index)
    if info.reverse:
        mark_undone(result, _to_take_back(frame, result, transformation, marked))
        record = as_undone(record, taken_back)
    return result, record


def _to_take_back(
    frame: Frame, graph_module: GraphModule, transformation: Transformation, marked: Collection[str]
) -> list[Record]:
    """Return the records that reversing a pass takes back: all, or the last that changed something.

    Core undoes all that it finds in the ledger, and what marks its nodes finds all of those. What does neither takes
    back one run at a time (an argument that each run multiplies).
    """
    records = list(filter(frame.undoes, own_records(graph_module, transformation)))
    if marked or any(record.operations is not None for record in records):
        return records
    changed = [place for place, record in enumerate(records) if record.changed]
    return records[changed[-1] :] if changed else records


def _may_have_something_to_undo(
    transformation: Transformation, signature: str, taken_back: Sequence[Record], marked: Collection[str]
) -> bool:
    """Return whether a pass is to reverse anything: `reverse` of a user's pass may not look at what there is.

    Where neither a record nor a mark tells of the pass, there is nothing, unless it has no signature to be told by.
    """
    return not transformation._edits or not signature or bool(taken_back) or bool(marked)


def as_undone(record: Record, taken_back: Sequence[Record]) -> Record:
    """Return the record of a reversal: what was taken back, in place of what the reversal itself did."""
    rewrites = tuple(rewrite for each in taken_back for rewrite in each.rewrites)
    return replace(record, state="undone", rewrites=rewrites, operations=None, derived=())
