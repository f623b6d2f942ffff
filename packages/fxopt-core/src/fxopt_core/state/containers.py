"""What a snapshot keeps of containers: what each of them held, by reference, however deep it lies inside of others.

Containers are dictionaries, lists, sets, double-ended queues, byte arrays, and subclasses of them. Tuples are walked
through. What is inside of other objects is theirs: a snapshot restores which object sits where, not what it holds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from itertools import chain
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.passes.shape_prop import TensorMetadata
from torch.fx.traceback import NodeSource

Container: TypeAlias = "dict[Any, Any] | list[Any] | set[Any] | deque[Any] | bytearray"
Contents: TypeAlias = "dict[Any, Any] | list[Any] | set[Any] | bytes"
CONTAINERS = (dict, list, set, deque, bytearray)

# What is in nearly every `meta` and holds no container that anyone would edit; told apart early, for speed.
_LEAVES = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type, FunctionType, BuiltinFunctionType}
    | {torch.Size, torch.dtype, torch.device, OpOverload, FakeTensor, Node, NodeSource, TensorMetadata}
)
_COPY: dict[type, Callable[[Any], Any]] = {dict: dict, list: list, set: set, deque: list, bytearray: bytes}
_INSIDE: dict[type, Callable[[Any], Iterable[object]]] = {dict: dict.values, list: iter, tuple: iter, deque: iter}


def put_back(container: Container, contents: Any) -> None:
    """Make a container hold what a copy of it holds, in the same order, without replacing the object.

    What holds the contents is a copy as `shallow_copy` makes it, or another container of the kind.

    >>> hooks = {"first": 1}; alias = hooks
    >>> put_back(hooks, {"second": 2})
    >>> alias
    {'second': 2}
    """
    base: Any = next((each for each in (OrderedDict, dict, set, deque) if isinstance(container, each)), None)
    if base is not None:
        base.clear(container)
        getattr(base, "extend" if base is deque else "update")(container, contents)
    else:
        base = list if isinstance(container, list) else bytearray
        base.__setitem__(container, slice(None), contents)


def shallow_copy(container: Container) -> Contents:
    """Return a plain dict, set, list or bytes with the same contents."""
    contents: Contents = next(copy for base, copy in _COPY.items() if isinstance(container, base))(container)
    return contents


class Containers:
    """Containers with what they held, each recorded once, in however many places it is.

    >>> meta = {"stack": [1, {"deep": [2]}]}
    >>> containers = Containers()
    >>> containers.add([meta])
    []
    >>> meta["stack"][1]["deep"].append(3)
    >>> containers.restore()
    >>> meta
    {'stack': [1, {'deep': [2]}]}
    """

    def __init__(self) -> None:
        self._seen: dict[int, object] = {}
        self._bases: dict[type, type] = {}
        self._records: list[tuple[list[Any], list[Any]]] = []

    def add(self, values: Iterable[object]) -> list[Tensor]:
        """Record the containers among some values and those inside of them.

        The work is done level by level in comprehensions, since there are several containers for every node.

        Returns:
            The tensors with data that were found on the way.
        """
        tensors: list[Tensor] = []
        seen, rest = self._seen, values
        while level := [value for value in rest if type(value) not in _LEAVES]:
            unique = dict(zip(map(id, level), level, strict=True))  # many nodes share what tells their module
            inside: list[Iterable[object]] = [value for value in unique.values() if type(value) is tuple]
            fresh = {key: value for key, value in unique.items() if type(value) is not tuple and key not in seen}
            seen.update(fresh)
            for base, items in self._by_base(list(fresh.values())):
                if base is Tensor:
                    tensors.extend(items)
                if base in _COPY:
                    self._records.append((items, list(map(_COPY[base], items))))
                if base in _INSIDE:
                    inside.extend(map(_INSIDE[base], items))
            rest = chain.from_iterable(inside)
        return tensors

    def _by_base(self, values: list[Any]) -> list[tuple[type, list[Any]]]:
        """Group values by the built-in class that theirs derives from; those of no such class are left away."""
        classes: dict[type, set[type]] = {}
        for cls in set(map(type, values)):
            if cls not in self._bases:
                bases = (*CONTAINERS, tuple, Tensor)
                self._bases[cls] = next((base for base in bases if issubclass(cls, base)), object)
            classes.setdefault(self._bases[cls], set()).add(cls)
        if len(classes) == 1:
            return [(base, values) for base in classes if base is not object]
        return [(b, [v for v in values if type(v) in mine]) for b, mine in classes.items() if b is not object]

    def add_dictionaries(self, dictionaries: list[dict[Any, Any]]) -> None:
        """Record many dictionaries, such as the `meta` of all nodes, of which hardly one is there twice."""
        self._records.append((dictionaries, list(map(dict, dictionaries))))
        self.add(chain.from_iterable(map(dict.values, dictionaries)))

    def restore(self) -> None:
        """Put the contents of all containers back."""
        for containers, contents in self._records:
            for container, held in zip(containers, contents, strict=True):
                put_back(container, held)
