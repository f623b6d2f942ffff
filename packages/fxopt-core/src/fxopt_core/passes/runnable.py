"""What a call of a pass needs to know of the pass; every `fxopt_core.Transformation` has it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol, runtime_checkable

from torch.fx import GraphModule


class Runnable(Protocol):
    """A pass, or a composition of passes."""

    @property
    def name(self) -> str:
        """Its name in kebab case."""

    @property
    def options(self) -> Mapping[str, object]:
        """The constructor's arguments by name."""

    @property
    def signature(self) -> str:
        """A digest of class and options; `TypeError` where an option has no stable value."""

    @property
    def preserves_computation(self) -> bool:
        """Whether the result computes what the input did, up to rounding."""

    @property
    def members(self) -> tuple[Runnable, ...] | None:
        """The passes that a composition consists of; None for a single pass."""

    @property
    def reversible(self) -> bool:
        """Whether it can be undone."""

    @property
    def undone_by_journal(self) -> bool:
        """Whether its ``reverse`` undoes the records that it finds in the ledger, and nothing else."""

    @property
    def _edits(self) -> bool:
        """Whether there may be anything to undo."""

    @property
    def _copies(self) -> bool:
        """Whether it works on a copy of its input."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Edit a graph module and return it, or a new one."""


@runtime_checkable
class Reversible(Protocol):
    """A pass that can be undone."""

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undo what `transform` did."""


def leaves(transformation: Runnable) -> list[Runnable]:
    """Return the passes that a composition comes down to, in order; for any other pass, that one."""
    if transformation.members is None:
        return [transformation]
    return [leaf for member in transformation.members for leaf in leaves(member)]
