"""One run of one pass under the instruments of this context."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

from torch.fx import GraphModule

from fxopt_core.errors import PassError, PostconditionError, VetoError
from fxopt_core.instruments import (
    InstrumentProtocol,
    PassRun,
    active_instruments,
    enter,
    inside,
    may_veto,
    report,
    report_failure,
    runs_the_module,
    unwilling,
)
from fxopt_core.ledger import Record
from fxopt_core.runs import Run
from fxopt_core.transaction import Snapshot
from fxopt_core.transformation import Transformation


def observed(
    run: Run,
    info: PassRun,
    graph_module: GraphModule,
    body: Callable[[], tuple[GraphModule, Record]],
    *,
    as_a_whole: bool = False,
) -> tuple[GraphModule, Record | None]:
    """Run one pass within an open transaction, and let instruments see it, skip it or veto it.

    Args:
        run: the open transaction.
        info: what instruments are told of the pass.
        graph_module: what it works on.
        body: runs it; returns its result and its record.
        as_a_whole: whether the run makes no sense without this pass, so that to skip or veto it is an error.

    Returns:
        The result and the record; no record where the pass was skipped. After a veto, the graph module as it was, and a
        record that says so.

    Raises:
        PassError: The pass failed, or an instrument did; the error names the pass and its place.
        VetoError: An instrument skipped or vetoed the pass, and the run has to be rolled back for it.
    """
    instruments = active_instruments()
    entered: list[InstrumentProtocol] = []
    seen = graph_module
    try:
        runs_module = any(map(runs_the_module, instruments))
        with _compiled_when_called(graph_module, bool(instruments)):
            against = unwilling(instruments, info, graph_module)
        if against:
            if as_a_whole:
                raise _kept_from(info, against[0])
            return graph_module, None
        if runs_module:
            graph_module.recompile()
        guard = None if as_a_whole else _guard(run, graph_module, instruments)
        lazily = bool(instruments) and not runs_module
        with _compiled_when_called(graph_module, lazily):
            enter(entered, instruments, info, graph_module)
        with inside(info):
            seen, record = body()
        if runs_module:
            lint_and_recompile(seen, info.transformation)
        with _compiled_when_called(seen, lazily):
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
    return graph_module, replace(record, state="vetoed", operations=None, derived=())


@contextmanager
def _compiled_when_called(graph_module: GraphModule, lazily: bool) -> Iterator[None]:
    """Let a graph module generate its code anew if it is called meanwhile, as a run does so at its end only.

    So an instrument may run the module without having said so (``runs_module``), or not run it at no cost.
    """
    cls = type(graph_module)
    compiled = vars(cls).get("forward")
    if not lazily or compiled is None:
        yield
        return

    def forward(self: GraphModule, *args: Any, **kwargs: Any) -> Any:
        self.recompile()  # which takes this one's place
        return self.forward(*args, **kwargs)

    cls.forward = forward  # the class is this graph module's own
    try:
        yield
    finally:
        if vars(cls).get("forward") is forward:
            cls.forward = compiled


def lint_and_recompile(graph_module: GraphModule, transformation: Transformation) -> None:
    """Check a graph and generate its code anew.

    Raises:
        PostconditionError: The graph is broken.
    """
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


def _kept_from(info: PassRun, instrument: InstrumentProtocol) -> VetoError:
    return _as_a_whole(
        VetoError(
            f"undoing pass `{info.name}` was declined by {type(instrument).__name__} (should_run)",
            pass_name=info.name,
            index=info.index,
        )
    )


def _as_a_whole(veto: VetoError) -> VetoError:
    message = (
        f"{veto}. undo takes back a run as a whole, so nothing was changed: reverse single passes by "
        "transformation(graph_module, reverse=True), or undo without that instrument"
    )
    return VetoError(message, pass_name=veto.pass_name, index=veto.index)


def _guard(run: Run, graph_module: GraphModule, instruments: Sequence[InstrumentProtocol]) -> Snapshot | None:
    """Return a snapshot for one pass, where an instrument may veto it."""
    if not any(map(may_veto, instruments)):
        return None
    return Snapshot.take(graph_module, protect_values=run.protect_values)


def _take_back(guard: Snapshot | None, veto: VetoError) -> None:
    """Restore what was before a vetoed pass.

    Raises:
        VetoError: That is not possible, so that the whole run has to be rolled back.
    """
    if guard is None:
        raise VetoError(f"{veto}, which core was not prepared for: an instrument that vetoes declares may_veto = True")
    written = guard.restore()
    if written:
        raise VetoError(f"{veto}, and cannot be taken back alone. {written_note(written)}")


def _raise_named(error: Exception, info: PassRun) -> NoReturn:
    """Raise a `PassError` that names the pass; one that is raised already gets the name where it has none."""
    if isinstance(error, PassError):
        error.pass_name = error.pass_name or info.name
        error.index = info.index if error.index is None else error.index
        raise error
    before = f" after {', '.join(f'`{name}`' for name in info.before)}" if info.before else ""
    place = f" (pass {info.index} of the composition{before})" if info.index is not None else ""
    what = "undoing it" if info.reverse else "it"
    raise PassError(
        f"pass `{info.name}`{place} failed, and {what} was rolled back: {type(error).__name__}: {error}",
        pass_name=info.name,
        index=info.index,
    ) from error
