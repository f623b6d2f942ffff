"""What a snapshot keeps of containers: what each of them held, by reference, however deep it lies inside of others.

Containers are dictionaries, lists, sets, double-ended queues, byte arrays, and subclasses of them. Tuples are walked
through. What is inside of other objects is theirs: a snapshot restores which object sits where, not what it holds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
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
CONTAINERS = (dict, list, set, deque, bytearray)
_WALKED = (*CONTAINERS, tuple)
MOSTLY_EMPTY = frozenset({dict, OrderedDict, list, set})

# What is in nearly every `meta` and holds no container that anyone would edit; told apart early, for speed.
_LEAVES = frozenset(
    {bool, int, float, complex, str, bytes, type(None), type, FunctionType, BuiltinFunctionType}
    | {torch.Size, torch.dtype, torch.device, OpOverload, FakeTensor, Node, NodeSource, TensorMetadata}
)


def put_back(container: Container, contents: Any) -> None:
    """Make a container hold what a copy of it holds, in the same order, without replacing the object.

    >>> hooks = {"first": 1}; alias = hooks
    >>> put_back(hooks, {"second": 2})
    >>> alias
    {'second': 2}
    """
    if not contents and type(container) in MOSTLY_EMPTY and not container:
        return  # as the hooks of most modules
    base: Any = next((each for each in (OrderedDict, dict, set, deque) if isinstance(container, each)), None)
    if base is not None:
        base.clear(container)
        getattr(base, "extend" if base is deque else "update")(container, contents)
    else:
        base = list if isinstance(container, list) else bytearray
        base.__setitem__(container, slice(None), contents)


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
        self._seen: dict[int, object] = {}  # containers and tuples, which stay alive
        self._records: list[tuple[Any, Any]] = []

    def add(self, values: Iterable[object]) -> list[Tensor]:
        """Record the containers among some values and those inside of them.

        Returns:
            The tensors with data that were found on the way.
        """
        tensors: list[Tensor] = []
        copy: Any  # what makes a plain copy
        inside: Iterable[object]
        waiting: list[Any] = [value for value in values if type(value) not in _LEAVES]
        while waiting:
            value = waiting.pop()
            if isinstance(value, dict):
                copy, inside = dict, value.values()
            elif isinstance(value, _WALKED):
                copy = set if isinstance(value, set) else bytes if isinstance(value, bytearray) else list
                inside = () if copy in (set, bytes) else value
            else:
                tensors += [value] if isinstance(value, Tensor) else []
                continue
            if id(value) not in self._seen:
                self._seen[id(value)] = value
                if not isinstance(value, tuple):
                    self._records.append((value, copy(value)))
                waiting += [item for item in inside if type(item) not in _LEAVES]
        return tensors

    def restore(self) -> None:
        """Put the contents of all containers back."""
        for container, contents in self._records:
            put_back(container, contents)
