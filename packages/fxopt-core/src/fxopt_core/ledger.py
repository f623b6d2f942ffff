"""The ledger: what was applied to a graph module, kept in ``graph_module.meta["fxopt"]``.

Everything here is immutable and holds no tensors: names, numbers of nodes, slices and settings. That is enough to undo
a pass from the tensors that the rewritten module has now, and to map its keys to those of the original checkpoint.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor
from torch.fx import GraphModule

from fxopt_core.checks import check_graph_module
from fxopt_core.errors import FxoptError
from fxopt_core.marks import META_KEY
from fxopt_core.references import operator_reference

LEDGER_VERSION = 1
State = Literal["applied", "undone", "vetoed"]


@dataclass(frozen=True)
class Refusal:
    """A candidate site that a pass left alone.

    Attributes:
        site: readable name of the site.
        reason: stable code; `fxopt_core.REASONS` says what each one means and what to do.
        message: one sentence with names.
        nodes: names of the nodes of the site.
    """

    site: str
    reason: str
    message: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Rewrite:
    """A site that a pass rewrote.

    Attributes:
        site: readable name of the site.
        before: names of the nodes that were replaced.
        after: names of the nodes that stand for them.
        modules_before: full names of the modules or parameters that were taken out.
        modules_after: full names of the modules that were put in.
    """

    site: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    modules_before: tuple[str, ...] = ()
    modules_after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Ref:
    """A node inside recorded arguments, by its number."""

    id: int


@dataclass(frozen=True)
class Piece:
    """Where the values of an original tensor are inside a new one.

    Attributes:
        key: full name of the new tensor.
        slices: (dimension, start, length) triples, applied one after the other.
        squeeze: a dimension of size 1 to drop at last, or None.
    """

    key: str
    slices: tuple[tuple[int, int, int], ...] = ()
    squeeze: int | None = None

    def take(self, tensor: Tensor) -> Tensor:
        """Return the view of ``tensor`` that holds the original's values.

        >>> import torch
        >>> Piece("merged.weight", ((0, 2, 3),)).take(torch.zeros(8, 4)).shape
        torch.Size([3, 4])
        """
        for dim, start, length in self.slices:
            tensor = tensor.narrow(dim, start, length)
        return tensor if self.squeeze is None else tensor.squeeze(self.squeeze)


@dataclass(frozen=True)
class TensorRow:
    """A tensor that was taken out: its key, where its values are now, the key before it, and its plain attributes."""

    name: str
    piece: Piece | None
    shape: tuple[int, ...]
    is_parameter: bool = True
    persistent: bool = True
    previous: str | None = None
    attributes: tuple[tuple[str, object], ...] = ()


@dataclass(frozen=True)
class Listed:
    """A list among recorded attributes: a record is immutable."""

    items: tuple[object, ...]


@dataclass(frozen=True)
class ModuleRow:
    """A module that was taken out, with what is needed to build it again.

    Attributes:
        name: full name.
        cls: ``"module:qualified.name"`` of its class.
        attributes: its plain attributes and its train/eval flag, as pairs; lists stand as `Listed`.
        tensors: its own parameters and buffers in order; absent ones have no piece and no shape.
        previous: the name that stood before it among its siblings.
        twin: full name of the new module whose train/eval flag it takes instead; None where there is none.
    """

    name: str
    cls: str
    attributes: tuple[tuple[str, object], ...]
    tensors: tuple[TensorRow, ...]
    previous: str | None
    twin: str | None


@dataclass(frozen=True)
class NodeRow:
    """A node: its operation, target, arguments with `Ref` for nodes, name, and the number of the node before it."""

    id: int
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    name: str
    type_expr: Any = None
    previous: int | None = None
    meta: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), compare=False)

    def __getstate__(self) -> dict[str, Any]:
        """Keep what pickles: targets by name, and of ``meta`` only what can travel."""
        state = dict(self.__dict__)
        state["target"] = operator_reference(self.target) or self.target
        state["meta"] = {key: value for key, value in self.meta.items() if _pickles(value)}
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Make ``meta`` immutable again."""
        state["meta"] = MappingProxyType(state["meta"])
        self.__dict__.update(state)


def _pickles(value: object) -> bool:
    try:
        pickle.dumps(value)
    except Exception:  # whatever it is, it stays behind
        return False
    return True


@dataclass(frozen=True)
class NodeAdded:
    """A pass put this node in."""

    row: NodeRow


@dataclass(frozen=True)
class NodeRemoved:
    """A pass took this node out."""

    row: NodeRow


@dataclass(frozen=True)
class NodeReplaced:
    """All users of one node read another one since.

    Attributes:
        old: number of the node that was replaced.
        new: number of the node that stands for it.
        places: where ``new`` had users of its own, the users of ``old`` and the places among their nested arguments at
            which they read it; otherwise None.
    """

    old: int
    new: int
    places: tuple[tuple[int, tuple[int, ...]], ...] | None = None


@dataclass(frozen=True)
class UsersOrdered:
    """The users of a node before a pass changed them, where they were not in the order of the graph."""

    node: int
    users: tuple[int, ...]


@dataclass(frozen=True)
class ModuleAdded:
    """A pass put this module in; ``shapes`` are those of its tensors by local name, None for an absent one."""

    name: str
    cls: str
    shapes: tuple[tuple[str, tuple[int, ...] | None], ...]


@dataclass(frozen=True)
class ModuleRemoved:
    """A pass took this module out."""

    row: ModuleRow


@dataclass(frozen=True)
class TensorRemoved:
    """A pass took this parameter or buffer out."""

    row: TensorRow


@dataclass(frozen=True)
class Neutral:
    """A region of a new tensor that no original has: the rewrite is the original's only while it holds ``value``."""

    piece: Piece
    value: float = 0.0


Operation = (
    NodeAdded | NodeRemoved | NodeReplaced | UsersOrdered | ModuleAdded | ModuleRemoved | TensorRemoved | Neutral
)


@dataclass(frozen=True)
class Derived:
    """New tensors that are computed from several originals, as in a folded batch norm.

    Attributes:
        function: ``"module:name"`` of the function that computes them.
        inputs: pairs of its tensor parameters and the original full names; None for an absent one.
        settings: pairs of its other parameters and their values.
        outputs: full names of the new tensors, in the order of its results; None for an absent one.
        restore: ``"module:name"`` of a function that goes back: it gets the new tensors by position and the settings by
            keyword, with ``shapes``, a mapping of the names in ``inputs`` to shapes (None for an absent one), and
            returns a mapping of these names to tensors from which ``function`` computes the same again. None where there
            is no way back.
    """

    function: str
    inputs: tuple[tuple[str, str | None], ...]
    settings: tuple[tuple[str, object], ...]
    outputs: tuple[str | None, ...]
    restore: str | None = None


@dataclass(frozen=True)
class Record:
    """One run of one pass.

    Attributes:
        pass_name: kebab-case name of the pass.
        transformation: ``"module:qualified.name"`` of its class.
        options: its options, as pairs; what is no plain value stands as its text.
        signature: its signature.
        rewrites: the sites that were rewritten.
        refusals: the sites that were left alone, each with its reason.
        seconds: how long the pass took.
        state: "applied", "undone", or "vetoed" by an instrument.
        run: number of the run; the passes of one composition share it.
        index: position in the composition, or None.
        reversible: whether the pass can be undone.
        changed: whether it changed anything.
        operations: what it did, one after the other, where core edited the graph for it.
        derived: tensors that it computed from several originals.
    """

    pass_name: str
    transformation: str
    options: tuple[tuple[str, object], ...]
    signature: str
    rewrites: tuple[Rewrite, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    seconds: float = 0.0
    state: State = "applied"
    run: int = 0
    index: int | None = None
    reversible: bool = False
    changed: bool = False
    operations: tuple[Operation, ...] | None = None
    derived: tuple[Derived, ...] = ()

    def __str__(self) -> str:
        """Return one line: what was done, and how often."""
        return (
            f"{self.pass_name}: {self.state}, {len(self.rewrites)} rewritten, {len(self.refusals)} refused, "
            f"{self.seconds * 1e3:.1f} ms"
        )


@dataclass(frozen=True)
class Ledger:
    """All records of a graph module, and the next free numbers for nodes and runs."""

    records: tuple[Record, ...] = ()
    next_id: int = 0
    next_run: int = 0
    version: int = LEDGER_VERSION

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        """Return itself: a ledger is immutable."""
        return self


def ledger_of(graph_module: GraphModule) -> Ledger:
    """Return the ledger of a graph module; an empty one where nothing was applied.

    Raises:
        FxoptError: A newer version of fxopt wrote the ledger.
    """
    ledger = graph_module.meta.get(META_KEY)
    if not isinstance(ledger, Ledger):
        return Ledger()
    if ledger.version > LEDGER_VERSION:
        raise FxoptError(
            f"the ledger of this graph module has version {ledger.version}, and this fxopt reads versions up to "
            f"{LEDGER_VERSION}: install a newer fxopt-core"
        )
    return ledger


def set_ledger(graph_module: GraphModule, ledger: Ledger) -> None:
    """Give a graph module its ledger."""
    graph_module.meta[META_KEY] = ledger


def append_record(graph_module: GraphModule, record: Record) -> None:
    """Add a record at the end of the ledger."""
    ledger = ledger_of(graph_module)
    next_run = max(ledger.next_run, record.run + 1)
    set_ledger(graph_module, replace(ledger, records=(*ledger.records, record), next_run=next_run))


def adopt_records(graph_module: GraphModule, known: int, run: int) -> None:
    """Make the records behind the first ``known`` ones part of a run: its pass called others inside of itself."""
    ledger = ledger_of(graph_module)
    fresh = ledger.records[known:]
    if fresh:
        records = (*ledger.records[:known], *(replace(record, run=run) for record in fresh))
        set_ledger(graph_module, replace(ledger, records=records, next_run=run + 1))


def applied_records(graph_module: GraphModule, signature: str) -> list[Record]:
    """Return the records of the pass with this signature that are applied and not undone, oldest first."""
    records = ledger_of(graph_module).records
    return [record for record in records if record.state == "applied" and record.signature == signature]


def mark_undone(graph_module: GraphModule, records: Iterable[Record]) -> None:
    """Set the state of records to "undone"; what only undoing needed is dropped from them."""
    undone = {id(record) for record in records}
    ledger = ledger_of(graph_module)
    kept = tuple(
        replace(record, state="undone", operations=None, derived=()) if id(record) in undone else record
        for record in ledger.records
    )
    if undone:
        set_ledger(graph_module, replace(ledger, records=kept))


def history(graph_module: GraphModule) -> tuple[Record, ...]:
    """Return the records of all that was applied to a graph module, oldest first.

    Raises:
        PreconditionError: It is no graph module.

    >>> import torch
    >>> history(torch.fx.symbolic_trace(torch.nn.ReLU()))
    ()
    """
    check_graph_module(graph_module, "history")
    return ledger_of(graph_module).records
