"""The edits of a pass, with rows that describe the nodes, modules and tensors that they added or removed.

All of it is immutable data without tensors. Undo, key maps and drawings interpret edits as `EditVisitor`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxopt_core import NodeTag
from fxopt_rewrite.data.codec import stored
from fxopt_rewrite.data.policies import Unresolved as Unresolved


@stored
@dataclass(frozen=True, slots=True)
class Ref:
    """A node inside recorded arguments, by its number."""

    id: int


@stored
@dataclass(frozen=True, slots=True)
class Piece:
    """Where the values of an original tensor are inside a new one.

    Attributes:
        key: full name of the new tensor.
        slices: (dimension, start, length) triples, applied one after the other.
        squeeze: a dimension of size 1 to drop after slicing, or None.
        transposed: whether to transpose the matrix last, as between ``Conv1D`` of GPT-2 and ``nn.Linear``.
    """

    key: str
    slices: tuple[tuple[int, int, int], ...] = ()
    squeeze: int | None = None
    transposed: bool = False

    def take(self, tensor: Tensor) -> Tensor:
        """Return the view of the new tensor that holds the original's values.

        >>> import torch
        >>> Piece("merged.weight", ((0, 2, 3),)).take(torch.zeros(8, 4)).shape
        torch.Size([3, 4])
        >>> Piece("merged.weight", ((0, 2, 3),), transposed=True).take(torch.zeros(8, 4)).shape
        torch.Size([4, 3])
        """
        for dim, start, length in self.slices:
            tensor = tensor.narrow(dim, start, length)
        if self.squeeze is not None:
            tensor = tensor.squeeze(self.squeeze)
        return tensor.t() if self.transposed else tensor


@stored
@dataclass(frozen=True, slots=True)
class TensorRow:
    """A parameter or buffer that was removed; one that was None has no piece, shape and dtype."""

    name: str  # full name
    piece: Piece | None  # where its values are now; None if they are gone
    shape: tuple[int, ...]
    is_parameter: bool = True
    persistent: bool = True
    previous: str | None = None  # the key before it in its module, None for the first
    dtype: torch.dtype | None = None
    strides: tuple[int, ...] | None = None  # if it was not contiguous


@stored
@dataclass(frozen=True, slots=True)
class Listed:
    """A list among recorded attributes, as a tuple: records are immutable."""

    items: tuple[object, ...]


@stored
@dataclass(frozen=True, slots=True)
class ModuleRow:
    """A module that was removed, with everything needed to build it again."""

    name: str  # full name
    cls: str  # ``"module:qualified.name"``
    attributes: tuple[tuple[str, object], ...]  # plain ones and ``training``; lists are `Listed`
    tensors: tuple[TensorRow, ...]  # its own parameters and buffers, in order
    previous: str | None  # the name before it among its siblings, None for the first
    twin: str | None  # full name of the new module whose ``training`` it takes instead


@stored
@dataclass(frozen=True, slots=True)
class NodeRow:
    """A node: its number in the ledger, operation, target, arguments with `Ref` for nodes, name and type annotation.

    ``previous`` is the number of the node before it. For a node that was removed, ``meta`` (without values) and its tag
    are kept, too.
    """

    id: int
    op: str
    target: Any
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    name: str
    type_expr: Any = None
    previous: int | None = None
    meta: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}), compare=False)
    tag: NodeTag | None = field(default=None, compare=False)


class Edit(ABC):  # so that the codec takes subclasses where a field is an Edit
    """One edit of a graph module."""

    __slots__ = ()

    #: Name of the method for edits of this kind.
    visit: ClassVar[str]

    def __init_subclass__(cls, visit: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if visit:  # not where `dataclass` makes the class again, with slots
            cls.visit = visit

    def accept(self, visitor: EditVisitor) -> None:
        """Call the visitor's method for edits of this kind."""
        # A kind that the visitor lacks is an error: an undo that skipped it would record what did not happen.
        getattr(visitor, self.visit)(self)


EditT = TypeVar("EditT", bound=Edit)


class EditVisitor:
    """An interpretation of edits: a method for each kind, which does nothing unless a visitor overrides it."""

    def node_added(self, edit: NodeAdded) -> None:
        """A pass added a node."""

    def node_removed(self, edit: NodeRemoved) -> None:
        """A pass removed a node."""

    def node_replaced(self, edit: NodeReplaced) -> None:
        """A pass let the users of a node read another node."""

    def restrided(self, edit: Restrided) -> None:
        """A pass gave values of nodes other strides."""

    def module_added(self, edit: ModuleAdded) -> None:
        """A pass added a module."""

    def module_removed(self, edit: ModuleRemoved) -> None:
        """A pass removed a module."""

    def tensor_removed(self, edit: TensorRemoved) -> None:
        """A pass removed a parameter or buffer."""

    def neutral(self, edit: Neutral) -> None:
        """A pass filled a region of a new tensor with a constant."""

    def custom(self, edit: CustomEdit) -> None:
        """A pass did something else, which the edit itself can take back."""


def of_kind(edits: Iterable[Edit], kind: type[EditT]) -> list[EditT]:
    """Return the edits of exactly this class, in order."""
    # `isinstance` takes seven times as long for an ABC, and editors ask this at each site.
    return [edit for edit in edits if type(edit) is kind]


@stored
@dataclass(frozen=True, slots=True)
class NodeAdded(Edit, visit="node_added"):
    """A pass added this node."""

    row: NodeRow


@stored
@dataclass(frozen=True, slots=True)
class NodeRemoved(Edit, visit="node_removed"):
    """A pass removed this node."""

    row: NodeRow


@stored
@dataclass(frozen=True, slots=True)
class NodeReplaced(Edit, visit="node_replaced"):
    """The users of the node ``old`` were given the node ``new``.

    If ``new`` already had users, ``places`` has each user of ``old`` with the places among its nested arguments that
    read it.
    """

    old: int
    new: int
    places: tuple[tuple[int, tuple[int, ...]], ...] | None = None


@stored
@dataclass(frozen=True, slots=True)
class Restrided(Edit, visit="restrided"):
    """The described values of these nodes have other strides since."""

    nodes: tuple[int, ...]


@stored
@dataclass(frozen=True, slots=True)
class ModuleAdded(Edit, visit="module_added"):
    """A pass added this module; ``shapes`` and ``dtypes`` are those of its tensors, None for an absent one."""

    name: str
    cls: str
    shapes: tuple[tuple[str, tuple[int, ...] | None], ...]
    dtypes: tuple[torch.dtype | None, ...] = ()


@stored
@dataclass(frozen=True, slots=True)
class ModuleRemoved(Edit, visit="module_removed"):
    """A pass removed this module."""

    row: ModuleRow


@stored
@dataclass(frozen=True, slots=True)
class TensorRemoved(Edit, visit="tensor_removed"):
    """A pass removed this parameter or buffer."""

    row: TensorRow


@stored
@dataclass(frozen=True, slots=True)
class Neutral(Edit, visit="neutral"):
    """A region of a new tensor that no original fills, and that has to hold ``value`` for the rewrite to be exact."""

    piece: Piece
    value: float = 0.0


class CustomEdit(Edit, visit="custom"):
    """An edit of a pass's own kind: a change besides nodes, modules and tensors, and the way back.

    A kind is a frozen dataclass, decorated with `fxopt_core.stored`; `Editor.record` records an edit. The ledger holds
    the fields, which are plain data and may come from an untrusted file. An entry point of the group ``fxopt_journal``
    names the module that defines the kind, so that every process can read records with it.
    """

    __slots__ = ()

    @property
    def concerns(self) -> tuple[str, ...]:
        """Names of what it changed, such as a module's: of two edits that share one, the later is undone first."""
        return ()

    @abstractmethod
    def take_back(self, graph_module: GraphModule) -> None:
        """Undo the edit; any error is a refusal to undo the pass, and nothing is changed then."""
