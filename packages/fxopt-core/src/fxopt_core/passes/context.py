"""What is under way in this context: the outermost run and its snapshot, and the frame of the pass that is editing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from torch import Tensor
from torch.fx import GraphModule, Node

from fxopt_core.graph import iter_nodes
from fxopt_core.ledger.marks import forget_ids
from fxopt_core.ledger.records import Derived, Journal, Record, Refusal, Rewrite, has_ledger, ledger_of, set_ledger
from fxopt_core.passes.base import Pass
from fxopt_core.state.snapshot import Snapshot


@dataclass
class Frame:
    """What a running pass reports through core's editing operations."""

    graph_module: GraphModule
    rewrites: list[Rewrite] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    edits: list[Any] | None = None  # what it has done through an `Editor` so far; None where it made none
    journal: Journal | None = None  # the same as its record keeps it; complete after `flush`
    derived: list[Derived] = field(default_factory=list)
    marked: dict[Node, None] = field(default_factory=dict)
    next_id: int | None = None  # the next free number of a node; None until one is needed
    closing: list[Callable[[], None]] = field(default_factory=list)  # completes the edits that wait
    reads_every_form: bool = False  # whether it asked what nodes compute, and not what they call
    undoes_from: int | None = None  # the place in the composition from which to undo, if an equal pass comes before it

    def start_ids(self) -> int:
        """Return the next free number of a node, and drop the numbers that nodes have brought from elsewhere."""
        if self.next_id is None:
            if not has_ledger(self.graph_module):
                forget_ids(iter_nodes(self.graph_module.graph))
            self.next_id = ledger_of(self.graph_module).next_id
        return self.next_id

    def new_id(self) -> int:
        """Return a number that no node of the graph has."""
        number = self.start_ids()
        self.next_id = number + 1
        return number

    def undoes(self, record: Record) -> bool:
        """Return whether the turn of a record of the pass has come, last first."""
        return self.undoes_from is None or (record.index is not None and record.index >= self.undoes_from)

    def flush(self) -> None:
        """Complete the edits that wait, and write the next free number of a node into the ledger."""
        for close in self.closing:
            close()
        ledger = ledger_of(self.graph_module)
        if self.next_id is not None and self.next_id > ledger.next_id:
            set_ledger(self.graph_module, replace(ledger, next_id=self.next_id))
        self.next_id = None


@dataclass
class Run:
    """The outermost call that is under way on a graph module."""

    transformation: Pass
    graph_module: GraphModule
    snapshot: Snapshot  # of its state before
    number: int  # in the ledger
    protect_values: bool
    total: int = 1  # passes
    started: int = 0  # passes that had their turn
    names: list[str] = field(default_factory=list)  # of the passes that ran
    records: list[Record] = field(default_factory=list)  # of these
    current: GraphModule = field(init=False)  # the next pass works on it

    def __post_init__(self) -> None:
        self.current = self.graph_module


_FRAME: ContextVar[Frame | None] = ContextVar("fxopt_frame", default=None)
_RUN: ContextVar[Run | None] = ContextVar("fxopt_run", default=None)


def current_frame(graph_module: GraphModule) -> Frame | None:
    """Return the frame of the pass that is running on a graph module, or None."""
    frame = _FRAME.get()
    return frame if frame is not None and frame.graph_module is graph_module else None


def note_reading(graph_module: GraphModule | None) -> None:
    """Note that the running pass asks what the nodes of a graph compute, in whichever form they say it."""
    frame = _FRAME.get()
    if frame is not None and frame.graph_module is graph_module:
        frame.reads_every_form = True


def a_pass_is_running() -> bool:
    """Return whether a pass is inside of its ``transform`` or ``reverse`` in this context."""
    return _FRAME.get() is not None


def composing_run(graph_module: GraphModule) -> Run | None:
    """Return the run that is between two passes on a graph module; None outside one, and inside of a pass."""
    run = _RUN.get()
    return run if run is not None and run.current is graph_module and _FRAME.get() is None else None


def current_snapshot(graph_module: GraphModule) -> Snapshot | None:
    """Return the snapshot of the transaction that is open on a graph module, or None."""
    run = _RUN.get()
    return run.snapshot if run is not None and run.graph_module is graph_module else None


RELEASED_FROM = 1 << 18  # bytes: smaller tensors cost little, and come back as the same objects


def release(graph_module: GraphModule, tensor: Tensor, rebuild: Callable[[], Tensor]) -> None:
    """Let the transaction that is open on a graph module, if any, hold a large tensor only weakly.

    So its memory is free as soon as it is taken out of the graph module. For a rollback, ``rebuild`` returns its
    contents, in the same shape and dtype and on the same device; a tensor that someone still holds comes back itself.
    """
    snapshot = current_snapshot(graph_module)
    if snapshot is not None and tensor.numel() * tensor.element_size() >= RELEASED_FROM:
        snapshot.release(tensor, rebuild)


@contextmanager
def frame_open(frame: Frame | None) -> Iterator[None]:
    """Let editing operations report to a frame, or to none."""
    token = _FRAME.set(frame)
    try:
        yield
    finally:
        _FRAME.reset(token)


@contextmanager
def run_open(run: Run) -> Iterator[None]:
    """Make a run the current one; a pass that called it from inside of its own waits meanwhile."""
    outer = _FRAME.get()
    if outer is not None:
        outer.flush()
    with frame_open(None):
        token = _RUN.set(run)
        try:
            yield
        finally:
            _RUN.reset(token)


def note_mark(node: Node, *, marked: bool) -> None:
    """Tell the running pass's frame that a node was marked as transformed, or as restored."""
    frame = _FRAME.get()
    if frame is not None and marked:
        frame.marked[node] = None
    elif frame is not None:
        frame.marked.pop(node, None)
