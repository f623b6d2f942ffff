"""`PassRun`: one object for each pass that is under way, and the transaction around it.

Instruments are given the run, editing operations report to it, and it holds the snapshot to roll back to. It is the
parent of the runs of a composition's members, and of those that a pass starts inside its own ``transform``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from fxopt_core.errors import PassError, PreconditionError, halted_by
from fxopt_core.graph import iter_nodes
from fxopt_core.ledger.marks import forget_ids
from fxopt_core.ledger.records import Derived, Journal, Refusal, Rewrite, find_ledger, ledger_of, set_ledger
from fxopt_core.passes.base import Pass, leaves
from fxopt_core.state.snapshot import Snapshot


@dataclass(eq=False, repr=False)
class PassRun:
    """One pass about to run, running or over.

    Attributes:
        transformation: the pass.
        graph_module: what it works on.
        index: position among all single passes of the outermost composition, or None outside one.
        reverse: whether it is being undone.
        parent: the run that this one is part of: of a composition, or of a pass that calls others. None for an
            outermost run. Instruments see compositions only here, not as runs of their own.

    The other attributes are core's and the editors'.
    """

    transformation: Pass
    graph_module: GraphModule
    index: int | None = None
    reverse: bool = False
    parent: PassRun | None = None
    number: int = 0  # in the ledger
    since: int = 0  # its place in a composition, if an equal pass stands before it

    # What the pass reports while it edits.
    is_editing: bool = False  # whether it is inside of its `transform` or `reverse`
    rewrites: list[Rewrite] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    edits: list[Any] | None = None  # through an `Editor`; None if it made none
    journal: Journal | None = None  # the same as its record keeps it, after `flush`
    derived: list[Derived] = field(default_factory=list)
    marked: dict[Node, None] = field(default_factory=dict)
    next_id: int | None = None  # the next free number of a node, once one is needed
    closing: list[Callable[[], None]] = field(default_factory=list)  # completes the edits that wait

    # What a transaction keeps.
    snapshots: list[Snapshot] = field(default_factory=list)
    protect_values: bool = False
    places: Iterator[int] = field(default_factory=lambda: iter(()))  # of its passes that have not had their turn
    written: tuple[str, ...] = ()  # tensors that a rollback could not bring back

    @property
    def name(self) -> str:
        """Name of the pass."""
        return self.transformation.name

    def start_ids(self) -> int:
        """Return the next free number of a node; in a graph without a ledger, first drop the numbers of its nodes."""
        if self.next_id is None:
            if find_ledger(self.graph_module) is None:
                forget_ids(iter_nodes(self.graph_module.graph))
            self.next_id = ledger_of(self.graph_module).next_id
        return self.next_id

    def new_id(self) -> int:
        """Return a number that no node of the graph has."""
        number = self.start_ids()
        self.next_id = number + 1
        return number

    def flush(self) -> None:
        """Complete pending edits, and write the next free number of a node into the ledger."""
        for close in self.closing:
            close()
        ledger = ledger_of(self.graph_module)
        if self.next_id is not None and self.next_id > ledger.next_id:
            set_ledger(self.graph_module, replace(ledger, next_id=self.next_id))
        self.next_id = None


_CURRENT: ContextVar[PassRun | None] = ContextVar("fxopt_run", default=None)


def editing_run(graph_module: GraphModule | None = None) -> PassRun | None:
    """Return the run whose pass is inside of its ``transform`` or ``reverse``, on this graph module if one is given."""
    run = _CURRENT.get()
    found = run is not None and run.is_editing and (graph_module is None or run.graph_module is graph_module)
    return run if found else None


def new_run(transformation: Pass, graph_module: GraphModule, *, reverse: bool = False) -> PassRun:
    """Return a new run of a pass, whose parent is the current run, if there is one.

    What a pass calls on its own graph module gets its number, and is undone with it.
    """
    parent, places = _CURRENT.get(), range(len(leaves(transformation)))
    run = PassRun(transformation, graph_module, reverse=reverse, parent=parent)
    run.number = parent.number if parent and parent.graph_module is graph_module else ledger_of(graph_module).next_run
    run.places = reversed(places) if reverse else iter(places)
    return run


@contextmanager
def inside(run: PassRun, *, editing: bool = False) -> Iterator[None]:
    """Make a run the parent of those that start in the ``with`` block; with ``editing``, let it note what edits do."""
    token, run.is_editing = _CURRENT.set(run), editing
    try:
        yield
        if editing:
            run.flush()
    finally:
        _CURRENT.reset(token)
        run.is_editing = False
        run.closing.clear()  # instruments may keep the run, which must not keep its editors alive


@contextmanager
def transaction(run: PassRun) -> Iterator[None]:
    """Roll back the graph module of a run if the ``with`` block raises, and raise an error that says so."""
    graph_module, outer, handled = run.graph_module, _CURRENT.get(), sys.exc_info()[1]
    if any(cls.__name__ == "FSDPModule" for cls in type(graph_module).__mro__):
        found = "the graph module was given to fully_shard, after which torch cannot regenerate its code"
        raise PreconditionError(f"pass `{run.name}`: {found}. Rewrite and undo before that", pass_name=run.name)
    # The calling pass may have edits pending, which the snapshot has to include.
    if outer is not None and outer.is_editing:
        outer.flush()
    run.snapshots.append(Snapshot(graph_module, protect_values=run.protect_values))
    try:
        with inside(run):
            yield
    except BaseException as error:
        run.written = run.snapshots[-1].restore()
        error = halted_by(error, handled) or error
        if outer is None or outer.is_editing:  # else the call that this is part of says so
            error = named(error, run)
        if run.written and isinstance(error, PassError) and _WRITTEN not in str(error):
            found = f"{str(error).rstrip('.')}{_WRITTEN}: {', '.join(run.written)}"
            error.args = (f"{found}. Run it with protect_values=True to have them copied first.",)
        raise error
    finally:
        del run.snapshots[-1]  # no call, which an interrupt could end after the rollback had its chance


_WRITTEN = ". The pass wrote values in place, which a rollback does not restore"


def named(error: BaseException, run: PassRun) -> BaseException:
    """Return an error as a `PassError` that names the pass and its place; an interrupt stays one."""
    if isinstance(error, PassError):
        error.pass_name = error.pass_name or run.name
        error.index = run.index if error.index is None else error.index
    elif isinstance(error, Exception):
        place = f" (pass {run.index} of the composition)" if run.index is not None else ""
        failed = f"pass `{run.name}`{place} failed, and {'undoing ' * run.reverse}it was rolled back"
        found = PassError(f"{failed}: {type(error).__name__}: {error}", pass_name=run.name, index=run.index)
        found.__cause__ = error
        return found
    return error


RELEASED_FROM = 1 << 18  # bytes: smaller tensors cost little, and come back as the same objects


def release(graph_module: GraphModule, tensor: Tensor, rebuild: Callable[[], Tensor]) -> None:
    """Let the transactions that are open on a graph module, if any, hold a large tensor only weakly.

    Its memory is then freed as soon as the graph module drops it. For a rollback, ``rebuild`` returns its contents, in
    the same shape and dtype and on the same device; a tensor that someone still holds comes back itself.
    """
    run = _CURRENT.get() if tensor.numel() * tensor.element_size() >= RELEASED_FROM else None
    while run is not None:
        for snapshot in run.snapshots if run.graph_module is graph_module else ():
            snapshot.release(tensor, rebuild)
        run = run.parent
