"""What is under way in this context: the outermost run and its snapshot, and the frame of the pass that is editing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxopt_core.graph import iter_nodes
from fxopt_core.ledger import Derived, Operation, Piece, Record, Refusal, Rewrite, has_ledger, ledger_of, set_ledger
from fxopt_core.marks import forget_ids
from fxopt_core.transaction import Snapshot

if TYPE_CHECKING:
    from fxopt_core.transformation import Transformation


@dataclass
class Frame:
    """What a running pass reports through core's editing operations.

    Attributes:
        graph_module: what the pass edits.
        rewrites: the sites that it rewrote.
        refusals: the sites that it left alone.
        operations: its edits, or None where it made none through an `Editor`.
        derived: tensors that it computed from several originals.
        marked: the nodes that it marked as transformed.
        next_id: the next free number of a node; None until one is needed.
        closing: what completes the edits that wait.
        undoes_from: the place in the composition from which on records are undone, where an equal pass is before it.
    """

    graph_module: GraphModule
    rewrites: list[Rewrite] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)
    operations: list[Operation] | None = None
    derived: list[Derived] = field(default_factory=list)
    marked: dict[Node, None] = field(default_factory=dict)
    next_id: int | None = None
    closing: list[Callable[[], None]] = field(default_factory=list)
    undoes_from: int | None = None

    def start_ids(self) -> int:
        """Return the next free number of a node, and make sure that those which nodes have are of this ledger."""
        if self.next_id is None:
            if not has_ledger(self.graph_module):
                forget_ids(iter_nodes(self.graph_module.graph))  # they came with nodes from elsewhere
            self.next_id = ledger_of(self.graph_module).next_id
        return self.next_id

    def new_id(self) -> int:
        """Return a number that no node of the graph has."""
        number = self.start_ids() if self.next_id is None else self.next_id
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
    """The outermost call that is under way on a graph module.

    Attributes:
        transformation: what was called.
        graph_module: what it was called with.
        snapshot: its state before.
        number: the number of the run in the ledger.
        protect_values: whether snapshots hold the contents of tensors, too.
        total: how many passes it consists of.
        started: how many of them had their turn.
        names: the names of those that ran.
        records: their records.
        current: the graph module that the next pass works on.
    """

    transformation: Transformation
    graph_module: GraphModule
    snapshot: Snapshot
    number: int
    protect_values: bool
    total: int = 1
    started: int = 0
    names: list[str] = field(default_factory=list)
    records: list[Record] = field(default_factory=list)
    current: GraphModule = field(init=False)

    def __post_init__(self) -> None:
        self.current = self.graph_module


_FRAME: ContextVar[Frame | None] = ContextVar("fxopt_frame", default=None)
_RUN: ContextVar[Run | None] = ContextVar("fxopt_run", default=None)


def current_frame(graph_module: GraphModule) -> Frame | None:
    """Return the frame of the pass that is running on a graph module, or None."""
    frame = _FRAME.get()
    return frame if frame is not None and frame.graph_module is graph_module else None


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


RELEASED_FROM = 1 << 18
"""Size in bytes from which a tensor is released: smaller ones cost little, and come back as the same objects."""


def release(graph_module: GraphModule, tensor: Tensor, rebuild: Callable[[], Tensor]) -> None:
    """Let the open transaction hold a large tensor only weakly, if it can be built again for a rollback.

    So its memory is free as soon as it is taken out of the graph module, unless the caller's model holds it, too; then
    the very same tensor comes back.

    Args:
        graph_module: what the transaction is open on; without one, nothing is done.
        tensor: the tensor.
        rebuild: returns its contents, in the same shape and dtype and on the same device.
    """
    snapshot = current_snapshot(graph_module)
    if snapshot is not None and tensor.numel() * tensor.element_size() >= RELEASED_FROM:
        snapshot.release_tensor(tensor, rebuild)


def release_for(graph_module: GraphModule, tensor: Tensor, piece: Piece) -> None:
    """Release a tensor where a rollback can cut it out of the one again that holds its values now."""
    if tensor.numel() * tensor.element_size() < RELEASED_FROM:
        return
    owner, _, key = piece.key.rpartition(".")
    source = getattr(graph_module.get_submodule(owner), key).detach()
    if tensor.is_contiguous() and source.dtype == tensor.dtype:
        release(graph_module, tensor, lambda: piece.take(source).clone(memory_format=torch.contiguous_format))


@contextmanager
def frame_open(frame: Frame) -> Iterator[None]:
    """Let editing operations report to a frame."""
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
    frame = _FRAME.set(None)
    try:
        token = _RUN.set(run)
        try:
            yield
        finally:
            _RUN.reset(token)
    finally:
        _FRAME.reset(frame)


def note_mark(node: Node, *, marked: bool) -> None:
    """Tell the running pass's frame that a node was marked as transformed, or as restored."""
    frame = _FRAME.get()
    if frame is None:
        return
    if marked:
        frame.marked[node] = None
    else:
        frame.marked.pop(node, None)
