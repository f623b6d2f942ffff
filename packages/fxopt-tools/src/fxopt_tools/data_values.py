"""Values of graphs and modules as plain JSON data and a list of tensors, and back.

What JSON has no form for goes by name (functions, classes) or, pickled, into a list of objects. Reading such data makes
nothing but numbers, text, containers, tensors and torch's own functions of tensors, unless it is told to trust the
data: then it imports what is named, and opens the pickled objects.
"""

from __future__ import annotations

import builtins
import importlib
import math
import operator
import pickle
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.fx import Node
from torch.overrides import get_overridable_functions

from fxopt_core import PreconditionError
from fxopt_core.json_values import MalformedError, ValueReader, ValueWriter, find, name_of
from fxopt_core.references import describe

_BUILTINS = (
    "abs all any bool complex divmod float getattr int isinstance len list max min pow range round slice str sum tuple"
)
_NOT_PLAIN = {"attrgetter", "call", "itemgetter", "methodcaller"}
_FACTORIES = (
    "arange as_tensor empty empty_like eye full full_like linspace ones ones_like rand rand_like randint randn "
    "randn_like randperm scalar_tensor tensor zeros zeros_like sym_float sym_int sym_ite sym_max sym_min sym_not"
)

_TRUST = "To import and {} what the file names, whatever it does, say trusted=True, if you trust whoever wrote the file"


class Tensors:
    """Tensors by number; each stands once, however often it is written."""

    def __init__(self) -> None:
        self.items: list[Tensor] = []
        self._numbers: dict[int, int] = {}

    def number(self, tensor: Tensor) -> int:
        """Return the number of a tensor."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.items)
            self.items.append(tensor)
        return self._numbers[id(tensor)]


class DataWriter:
    """Writes values.

    Attributes:
        tensors: the tensors among them.
        objects: what has neither a form nor a name.
    """

    def __init__(self) -> None:
        self.tensors = Tensors()
        self.objects: list[object] = []

    def write(self, value: object, node: Callable[[Node], int] | None = None) -> Any:
        """Return a value as JSON data; with the numbers of nodes, where they may be in it."""
        own: dict[type, Callable[[ValueWriter, Any], Any]] = {
            kind: lambda _, tensor: {"tensor": self.tensors.number(tensor)} for kind in (Tensor, nn.Parameter)
        }
        if node is not None:
            own[Node] = lambda _, item: {"node": node(item)}
        return ValueWriter(own, self.objects).write(value)

    def check_objects(self) -> None:
        """Check that what has neither form nor name can be pickled.

        Raises:
            PreconditionError: Something cannot be.
        """
        for item in self.objects:
            try:
                pickle.dumps(item)
            except Exception as error:
                raise PreconditionError(f"{describe(item)} can be neither named nor pickled: {error}") from error


class DataReader:
    """Reads what a `DataWriter` wrote.

    Args:
        tensors: the tensors.
        objects: what had no form; empty where the data is not trusted.
        trusted: whether functions and classes of any package are imported.
    """

    def __init__(self, tensors: Sequence[Tensor], objects: Sequence[object] = (), *, trusted: bool = False) -> None:
        self.tensors = tensors
        self.trusted = trusted
        self._objects = objects

    def read(self, data: object, nodes: Sequence[Node] = ()) -> Any:
        """Return a value.

        Raises:
            PreconditionError: It has to be trusted for that, and is not, or there is no such value.
        """
        own: dict[str, Callable[[ValueReader, Any], Any]] = {
            "tensor": lambda _, number: self.tensors[number],
            "node": lambda _, number: nodes[number],
            "name": lambda _, name: self.named(name),
            "object": lambda _, number: self._object(number),
        }
        try:
            return ValueReader(own).read(data)
        except (MalformedError, IndexError, TypeError) as error:
            raise PreconditionError(f"{str(data)[:80]} is no value of a reproducer: {error}") from error

    def named(self, name: str) -> Any:
        """Return the function or class of this name.

        Raises:
            PreconditionError: It is none of torch's plain functions, and the data is not trusted; or it is not there.
        """
        found = self._imported(name) if self.trusted else find(name)
        if not self.trusted and not is_plain(found):
            raise PreconditionError(
                f"the reproducer uses {name}, which is no function of torch on tensors. {_TRUST.format('run')}"
            )
        return found

    def module_class(self, name: str) -> type[nn.Module]:
        """Return the class of modules of this name.

        Raises:
            PreconditionError: It is none of torch's own, and the data is not trusted; or it is not there.
        """
        found = self._imported(name) if self.trusted else find(name)
        known = isinstance(found, type) and issubclass(found, nn.Module)
        if not known or not (self.trusted or found.__module__.startswith("torch.nn.")):
            raise PreconditionError(
                f"the reproducer uses modules of the class {name}, which is none of torch.nn. {_TRUST.format('run')}"
            )
        cls: type[nn.Module] = found
        return cls

    def _imported(self, name: str) -> Any:
        module, _, path = name.partition(":")
        try:
            found: Any = importlib.import_module(module)
            for part in path.split("."):
                found = getattr(found, part)
        except Exception as error:  # whatever importing somebody's module raises
            raise PreconditionError(
                f"the reproducer uses {name}, which cannot be had here: {type(error).__name__}: {error}. Install what "
                "it is part of, in the version that the file names"
            ) from error
        return found

    def _object(self, number: int) -> object:
        if not self.trusted:
            raise PreconditionError(
                f"the reproducer holds pickled objects, and opening a pickle can run any code. {_TRUST.format('open')}"
            )
        return self._objects[number]


def function_name(function: object) -> str | None:
    """Return the name by which a function or class is written; None if it has none.

    >>> function_name(operator.add), function_name(torch.ops.aten.add.Tensor), function_name(lambda: 0)
    ('_operator:add', 'torch:ops.aten.add.Tensor', None)
    """
    name = name_of(function)
    return None if name is not None and name.startswith("__main__:") else name


def is_plain_method(name: str) -> bool:
    """Return whether a method is one of tensors: a public one, or that of an operator.

    >>> is_plain_method("view"), is_plain_method("__add__"), is_plain_method("__reduce_ex__"), is_plain_method("system")
    (True, True, False, False)
    """
    of_operator = name.startswith("__") and name.strip("_") in set(operator.__all__) - _NOT_PLAIN
    return name.isidentifier() and hasattr(Tensor, name) and (of_operator or not name.startswith("_"))


def is_plain(function: object) -> bool:
    """Return whether a function computes on tensors and numbers and does nothing else, or is a type of such values.

    >>> is_plain(torch.relu), is_plain(operator.add), is_plain(eval), is_plain(torch.load)
    (True, True, False, False)
    """
    if isinstance(function, (OpOverload, OpOverloadPacket, HigherOrderOperator)):
        return True
    try:
        return function in _plain_functions()
    except TypeError:  # it is not hashable
        return False


@cache
def _plain_functions() -> frozenset[Any]:
    found = [getattr(operator, name) for name in operator.__all__ if name not in _NOT_PLAIN]
    found += [getattr(math, name) for name in dir(math) if not name.startswith("_")]
    found += [getattr(builtins, name) for name in _BUILTINS.split()]
    found += [getattr(torch, name) for name in _FACTORIES.split()]
    found += [function for functions in get_overridable_functions().values() for function in functions]
    found += [torch._assert, torch.fx._symbolic_trace._assert_is_none]  # what tracing puts in
    return frozenset([*filter(callable, found), Tensor, type(None)])
