"""The ledger: what was applied to a graph module, kept in ``graph_module.meta["fxopt"]``.

Everything here is immutable and holds no tensors, only names, numbers of nodes, slices and settings: enough to undo a
pass from the tensors of the rewritten module, and to map its keys to those of the original checkpoint.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch.fx import GraphModule

from fxopt_core.errors import UndoError
from fxopt_core.ledger.marks import META_KEY

#: Version of ledgers as JSON; incrementing it means incrementing the `FORMAT` of pickles, too.
LEDGER_VERSION = 1
_PLAIN_DATA = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)
State = Literal["applied", "undone", "vetoed"]
Memo = dict[object, Callable[[], object]]  # shared by the journals of one undo, and called after the last of them


@dataclass(frozen=True, slots=True)
class Refusal:
    """A candidate site that a pass left alone.

    Attributes:
        site: readable name of the site.
        reason: stable code; `fxopt_rewrite.REASONS` and the pass's ``reasons`` say what each means.
        message: one sentence with names.
        nodes: names of the nodes of the site.
    """

    site: str
    reason: str
    message: str
    nodes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rewrite:
    """A site that a pass rewrote.

    Attributes:
        site: readable name of the site.
        before: names of the nodes that were replaced.
        after: names of the nodes that replace them.
        modules_before: full names of the modules or parameters that were removed.
        modules_after: full names of the modules that were inserted.
        note: anything else to report, such as a measurement.
    """

    site: str
    before: tuple[str, ...] = ()
    after: tuple[str, ...] = ()
    modules_before: tuple[str, ...] = ()
    modules_after: tuple[str, ...] = ()
    note: str = ""


@dataclass(frozen=True, slots=True)
class Derived:
    """New tensors that are computed from several originals, as in a folded batch norm.

    Attributes:
        function: ``"module:name"`` of the function that computes them.
        inputs: pairs of its tensor parameters and the original full names; None for an absent one.
        settings: pairs of its other parameters and their values.
        outputs: full names of the new tensors, in the order of its results; None for an absent one.
        restore: ``"module:name"`` of the inverse, or None. It gets the new tensors by position, the settings by
            keyword, and ``shapes``, a mapping from the names in ``inputs`` to shapes (None for an absent one). It
            returns a mapping from these names to tensors from which ``function`` computes the same again.
    """

    function: str
    inputs: tuple[tuple[str, str | None], ...]
    settings: tuple[tuple[str, object], ...]
    outputs: tuple[str | None, ...]
    restore: str | None = None


def is_plain_data(value: object) -> bool:
    """Return whether a value is immutable data that a record may hold."""
    return all(map(is_plain_data, value)) if isinstance(value, tuple) else isinstance(value, _PLAIN_DATA)


def recorded_options(options: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    """Return options as a record holds them, with text for values that are not plain data."""
    return tuple((name, value if is_plain_data(value) else repr(value)) for name, value in options.items())


class Journal(ABC):
    """The edits that a pass made; the package that provides the `Editor` implements it."""

    __slots__ = ()

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of edits."""

    @abstractmethod
    def take_back(self, graph_module: GraphModule, pass_name: str, memo: Memo) -> None:
        """Undo the edits, last first, except for the work that the functions in ``memo`` do at the end.

        Raises:
            UndoError: An edit no longer fits the graph module, which is then half undone.
        """

    @abstractmethod
    def dependent(self, later: Iterable[Journal]) -> Journal | None:
        """Return the first of the later journals that has to be taken back before this one, or None."""

    @abstractmethod
    def shapes_after(self, shapes: Mapping[str, object]) -> dict[str, object]:
        """Return the shapes of all tensors by full name after the edits, given those before."""


def undo_error(pass_name: str, found: str, remedy: str) -> UndoError:
    """Return the error that says why a pass cannot be undone, and what to do."""
    return UndoError(f"cannot undo `{pass_name}`: {found}. Nothing was changed; {remedy}", pass_name=pass_name)


@dataclass(frozen=True)
class Record:
    """One run of one pass.

    Attributes:
        pass_name: kebab-case name of the pass.
        transformation: ``"module:qualified.name"`` of its class.
        options: pairs of its options and values, with text for values that are not plain data.
        signature: its signature.
        rewrites: the sites that were rewritten.
        refusals: the sites that were left alone, each with its reason.
        seconds: how long the pass took.
        state: "applied", "undone", or "vetoed" by an instrument.
        run: number of the run; the passes of one composition share it.
        index: position in the composition, or None.
        reversible: whether the pass can be undone.
        changed: whether it changed anything.
        journal: its edits; None if it made them without an `Editor`.
        derived: tensors that it computed from several originals.
        rekeyed: whether it changed names or shapes of tensors without recording how.
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
    journal: Journal | None = None
    derived: tuple[Derived, ...] = ()
    rekeyed: bool = False

    @property
    def options_text(self) -> str:
        """The options as keyword arguments of a call.

        >>> Record("merge", "m:Merge", (("min_group", 2), ("where", "layer.*")), "a1b2").options_text
        "min_group=2, where='layer.*'"
        """
        return ", ".join(f"{name}={value!r}" for name, value in self.options)

    @property
    def has_lost_edits(self) -> bool:
        """Whether the record names replacements by an `Editor`, but the journal with its edits is missing or empty."""
        return not self.journal and any(
            rewrite.modules_before or rewrite.modules_after or (self.journal is not None and rewrite.after)
            for rewrite in self.rewrites
        )


@dataclass(frozen=True)
class Ledger:
    """All records of a graph module, and the next free numbers for nodes and runs."""

    records: tuple[Record, ...] = ()
    next_id: int = 0
    next_run: int = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> Ledger:
        """Return itself: a ledger is immutable."""
        return self


def find_ledger(graph_module: GraphModule) -> Ledger | None:
    """Return the ledger of a graph module; None if it has none."""
    found = graph_module.meta.get(META_KEY)
    return found if isinstance(found, Ledger) else None


def ledger_of(graph_module: GraphModule) -> Ledger:
    """Return the ledger of a graph module; an empty one if nothing was applied."""
    return find_ledger(graph_module) or Ledger()


def set_ledger(graph_module: GraphModule, ledger: Ledger) -> None:
    """Store a ledger in a graph module."""
    graph_module.meta[META_KEY] = ledger


def applied_records(graph_module: GraphModule, signature: str, since: int = 0) -> list[Record]:
    """Return the records of the pass with this signature that are applied and not undone, oldest first.

    Only those from the place ``since`` of a composition on: equal passes have one signature, and each undoes only its
    own edits, because other passes may lie between them.
    """
    records = ledger_of(graph_module).records
    found = (record for record in records if record.state == "applied" and record.signature == signature)
    return [record for record in found if (record.index or 0) >= since]


def mark_undone(graph_module: GraphModule, records: Iterable[Record]) -> None:
    """Set the state of records to "undone", and drop the data that only undoing needs."""
    undone, ledger = {id(record) for record in records}, ledger_of(graph_module)
    kept = [
        replace(record, state="undone", journal=None, derived=()) if id(record) in undone else record
        for record in ledger.records
    ]
    if undone:
        set_ledger(graph_module, replace(ledger, records=tuple(kept)))
