"""A pass that is known by its record alone."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from torch.fx import GraphModule

from fxopt_core.errors import PreconditionError
from fxopt_core.ledger import Record
from fxopt_core.transformation import ReversibleTransformation


class RecordedPass(ReversibleTransformation):
    """Stands for the pass that made a record, where that one cannot be made again: it is not installed here, say.

    It has the pass's name, options and signature, so that it equals the pass, and undoes what the ledger knows how to.

    >>> RecordedPass(Record("fold", "elsewhere:Fold", (("times", 2),), "a1b2")).name
    'fold'
    """

    def __init__(self, record: Record) -> None:
        self._record = record

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Refuse.

        Raises:
            PreconditionError: Always.
        """
        raise PreconditionError(
            f"pass `{self.name}` cannot be applied: only its record is left, and its class "
            f"{self._record.transformation} cannot be made from it. Install what has it, and make it anew",
            pass_name=self.name,
        )

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undo all that an equal pass did to a graph module, as far as its records say how."""
        from fxopt_core.undo import undo_pass

        return undo_pass(graph_module, self.signature)

    @property
    def name(self) -> str:
        """The name in the record."""
        return self._record.pass_name

    @property
    def options(self) -> Mapping[str, object]:
        """The options in the record; what is no plain value stands as its text."""
        return MappingProxyType(dict(self._record.options))

    @property
    def signature(self) -> str:
        """The signature in the record.

        Raises:
            TypeError: The pass had none.
        """
        if not self._record.signature:
            raise TypeError(f"pass `{self.name}` had options without a stable value, and hence no signature")
        return self._record.signature

    def __repr__(self) -> str:
        """Return the name in angle brackets: no call makes it."""
        return f"<recorded pass {self.name}>"
