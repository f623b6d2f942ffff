"""Shallow copies of every container reachable from a module.

Containers are dictionaries, lists, sets, double-ended queues, byte arrays, and subclasses of them. Tuples are walked
through. The contents of other objects are not recorded: a snapshot restores which object sits where, not its contents.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import Node
from torch.fx.passes.shape_prop import TensorMetadata
from torch.fx.traceback import NodeSource

# Makes a plain copy of a container, without calling anything that a subclass defines.
_COPIES: dict[type, Callable[[Any], Any]] = {dict: dict, list: list, set: set, deque: list, bytearray: bytes}
_WALKED = (*_COPIES, tuple)

# Types that hold nothing that anyone could edit; skipped early, for speed.
ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), type, FunctionType, BuiltinFunctionType})
# Those that are in nearly every `meta`, and hold no container that anyone would edit.
_LEAVES = ATOMS | {torch.Size, torch.dtype, torch.device, OpOverload, FakeTensor, Node, NodeSource, TensorMetadata}


def put_back(container: Any, contents: Any) -> None:
    """Restore the contents of a container from a copy, in the same order, without replacing the object.

    Nothing that a subclass defines is called.

    >>> hooks = {"first": 1}; alias = hooks
    >>> put_back(hooks, {"second": 2})
    >>> alias
    {'second': 2}
    """
    # OrderedDict comes before dict, whose methods would bypass the order that an OrderedDict keeps for itself.
    base: Any = next(each for each in (OrderedDict, *_COPIES) if isinstance(container, each))
    if base in (list, bytearray):
        base.__setitem__(container, slice(None), contents)
    else:
        base.clear(container)
        getattr(base, "extend" if base is deque else "update")(container, contents)


class Containers:
    """Containers and their contents, each recorded once, however many references it has.

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
        self._held: dict[int, tuple[Any, Any]] = {}  # by id: a container, and a plain copy of it; a tuple twice

    def add(self, values: Iterable[object]) -> list[Any]:
        """Record the containers among some values and those inside of them; return the other objects that they hold."""
        others: list[Any] = []
        waiting: list[Any] = [value for value in values if type(value) not in _LEAVES]
        while waiting:
            value = waiting.pop()
            kind: type | None = type(value)
            if kind not in _WALKED:  # a subclass, or no container; most are tensors
                kind = None if isinstance(value, Tensor) else next((c for c in _WALKED if isinstance(value, c)), None)
            if kind is None:
                others.append(value)
            elif id(value) not in self._held:
                # Tuples are recorded too, so that one that many containers share is walked through once.
                self._held[id(value)] = value, _COPIES.get(kind, tuple)(value)
                inside = value.values() if kind is dict else () if kind is bytearray else value
                waiting += [item for item in inside if type(item) not in _LEAVES]
        return others

    def restore(self) -> None:
        """Restore the contents of all containers."""
        for container, contents in self._held.values():
            if not isinstance(container, tuple):
                put_back(container, contents)
