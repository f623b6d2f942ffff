"""What a record keeps of nodes, modules and tensors that a pass took out or put in, and of its edits, one by one.

Plain immutable data, without tensors; see `fxopt_core.ledger`, which re-exports all of it.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from fxopt_core.filling import filled_at_once
from fxopt_core.marks import NodeTag
from fxopt_core.references import operator_reference


@filled_at_once
@dataclass(frozen=True)
class Ref:
    """A node inside recorded arguments, by its number."""

    id: int


@dataclass(frozen=True)
class Unresolved:
    """What is known by a name alone, ``"module:qualified.name"``, until it is needed.

    Attributes:
        name: the name of a function, class or operator whose module is not loaded.
        form: where that is the class of a value, the JSON text of that value.
    """

    name: str
    form: str | None = None


@filled_at_once
@dataclass(frozen=True)
class Piece:
    """Where the values of an original tensor are inside a new one.

    Attributes:
        key: full name of the new tensor.
        slices: (dimension, start, length) triples, applied one after the other.
        squeeze: a dimension of size 1 to drop after that, or None.
        transposed: whether rows and columns are exchanged at last, as between ``Conv1D`` of GPT-2 and ``nn.Linear``.
    """

    key: str
    slices: tuple[tuple[int, int, int], ...] = ()
    squeeze: int | None = None
    transposed: bool = False

    def take(self, tensor: Tensor) -> Tensor:
        """Return the view of ``tensor`` that holds the original's values.

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


@filled_at_once
@dataclass(frozen=True)
class TensorRow:
    """A tensor that was taken out: its key, where its values are now, the key before it, and its plain attributes.

    Its dtype tells an absent tensor, which has none, from a number whose value is gone. Strides are those of a tensor
    that was not contiguous.
    """

    name: str
    piece: Piece | None
    shape: tuple[int, ...]
    is_parameter: bool = True
    persistent: bool = True
    previous: str | None = None
    attributes: tuple[tuple[str, object], ...] = ()
    dtype: torch.dtype | None = None
    strides: tuple[int, ...] | None = None

    def laid_out_as(self, tensor: Tensor) -> TensorRow:
        """Return this row with the strides of a tensor, where its memory is not in the usual order."""
        usual = tensor.layout != torch.strided or tensor.is_contiguous()
        return self if usual else replace(self, strides=tuple(tensor.stride()))


@dataclass(frozen=True)
class Listed:
    """A list among recorded attributes: a record is immutable."""

    items: tuple[object, ...]


def frozen(value: object) -> object:
    """Return an attribute as a record holds it."""
    return Listed(tuple(value)) if isinstance(value, list) else value


@filled_at_once
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


@filled_at_once
@dataclass(frozen=True)
class NodeRow:
    """A node: its operation, target, arguments with `Ref` for nodes, name, and the number of the node before it.

    Of one that was taken out, ``meta`` and what fxopt knew of it are kept, too.
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


@filled_at_once
@dataclass(frozen=True)
class NodeAdded:
    """A pass put this node in.

    Attributes:
        row: the node.
        counted: the name from which torch counted to name it, and the number that this name had before; only at the
            first node of a pass that took a name from there.
    """

    row: NodeRow
    counted: tuple[str, int | None] | None = None


@filled_at_once
@dataclass(frozen=True)
class NodeRemoved:
    """A pass took this node out."""

    row: NodeRow


@filled_at_once
@dataclass(frozen=True)
class NodeReplaced:
    """All users of one node read another one since.

    Attributes:
        old: number of the node that was replaced.
        new: number of the node that stands for it.
        places: where ``new`` had users of its own, the users of ``old`` and the places among their nested arguments at
            which they read it; otherwise None.
        dead: whether no output followed from ``old``, so that it may be taken out at any time.
    """

    old: int
    new: int
    places: tuple[tuple[int, tuple[int, ...]], ...] | None = None
    dead: bool = False


@dataclass(frozen=True)
class UsersOrdered:
    """The users of a node before a pass changed them, where they were not in the order of the graph."""

    node: int
    users: tuple[int, ...]


@filled_at_once
@dataclass(frozen=True)
class ModuleAdded:
    """A pass put this module in; ``shapes`` are those of its tensors by local name, None for an absent one."""

    name: str
    cls: str
    shapes: tuple[tuple[str, tuple[int, ...] | None], ...]
    dtypes: tuple[torch.dtype | None, ...] = ()

    @classmethod
    def of(cls, name: str, path: str, tensors: Mapping[str, Tensor | None]) -> ModuleAdded:
        """Return the operation for a module of this name and class with these tensors of its own."""
        shapes = tuple((key, None if tensor is None else tuple(tensor.shape)) for key, tensor in tensors.items())
        return cls(name, path, shapes, tuple(None if tensor is None else tensor.dtype for tensor in tensors.values()))


@filled_at_once
@dataclass(frozen=True)
class ModuleRemoved:
    """A pass took this module out."""

    row: ModuleRow


@filled_at_once
@dataclass(frozen=True)
class TensorRemoved:
    """A pass took this parameter or buffer out.

    Attributes:
        row: the tensor.
        owner: the module that held it, where that is empty since and nothing but a container.
    """

    row: TensorRow
    owner: ModuleRow | None = None


@filled_at_once
@dataclass(frozen=True)
class Neutral:
    """A region of a new tensor that no original has: the rewrite is the original's only while it holds ``value``."""

    piece: Piece
    value: float = 0.0


Operation = (
    NodeAdded | NodeRemoved | NodeReplaced | UsersOrdered | ModuleAdded | ModuleRemoved | TensorRemoved | Neutral
)
