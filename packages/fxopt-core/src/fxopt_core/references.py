"""Pickling by name what pickle cannot: operators, pytree specifications, node references; and asking if pickle can.

A `Rebuilt` stands for an object while pickling. Reading the pickle calls its function, so that the object itself
arrives and nothing needs decoding.
"""

from __future__ import annotations

import importlib
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.utils._pytree import TreeSpec, treespec_leaf

from fxopt_core.errors import FxoptError

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_CONTAINERS = frozenset({dict, OrderedDict, list, set, tuple})
_CONSTANTS = (torch.layout, torch.memory_format)


class NodeRef:
    """A node in the arguments of another one, by its position in the graph."""

    __slots__ = ("position",)

    def __init__(self, position: int) -> None:
        self.position = position

    def __reduce__(self) -> tuple[type[NodeRef], tuple[int]]:
        return NodeRef, (self.position,)


class Rebuilt:
    """What an object becomes in a pickle: a function of some module and the arguments to call it with."""

    __slots__ = ("_arguments", "_function")

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._function = function
        self._arguments = arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._function, self._arguments


class _Sink:
    """Somewhere to write to."""

    def write(self, data: bytes) -> int:
        """Drop the data."""
        return len(data)


class _Probe(pickle.Pickler):
    """A pickler that passes over tensors and modules, which are large and pickled on their own."""

    def persistent_id(self, obj: Any) -> str | None:
        return "" if isinstance(obj, (Tensor, nn.Module)) else None


class Prober:
    """Says why a value cannot be pickled by a protocol; remembers the answers while the values live."""

    def __init__(self, protocol: int) -> None:
        self._protocol = protocol
        self._known: dict[int, tuple[object, Exception | None]] = {}

    def obstacle(self, value: object) -> Exception | None:
        """Return the error of pickling a value, without its tensors and modules.

        >>> Prober(2).obstacle(len), type(Prober(2).obstacle(lambda: 0)).__name__
        (None, 'PicklingError')
        """
        if type(value) in _PLAIN or (type(value) in _CONTAINERS and not value):
            return None
        if id(value) not in self._known:
            self._known[id(value)] = value, self._try_to_pickle(value)
        return self._known[id(value)][1]

    def _try_to_pickle(self, value: object) -> Exception | None:
        try:
            _Probe(_Sink(), self._protocol).dump(value)
        except Exception as error:
            return error
        return None


def describe(value: object) -> str:
    """Name a value in a message, without printing what may be long.

    >>> describe(describe), describe(3)
    ('function fxopt_core.references.describe', 'a value of type int')
    """
    name = getattr(value, "__qualname__", None)
    if not isinstance(name, str):
        return f"a value of type {type(value).__qualname__}"
    return f"{type(value).__name__} {getattr(value, '__module__', None)}.{name}"


def operator_reference(value: object) -> Rebuilt | None:
    """Return what stands for an operator or a constant of torch in a pickle, None for anything else.

    >>> pickle.loads(pickle.dumps(operator_reference(torch.ops.aten.add.Tensor)))
    <OpOverload(op='aten.add', overload='Tensor')>
    >>> pickle.loads(pickle.dumps(operator_reference(torch.channels_last), 2))
    torch.channels_last
    """
    if isinstance(value, _CONSTANTS):
        return Rebuilt(load_constant, str(value).removeprefix("torch."))
    path = operator_path(value)
    return Rebuilt(load_operator, *path) if path and _find_operator(path) is value else None


def load_constant(name: str) -> object:
    """Return a layout or a memory format of torch; most protocols cannot pickle those."""
    return getattr(torch, name)


def load_class(module: str, name: str) -> object:
    """Return a class, or, where it cannot be had here, its full name, as torch's export graphs have it.

    >>> load_class("torch", "Tensor"), load_class("nowhere", "Attention")
    (<class 'torch.Tensor'>, 'nowhere.Attention')
    """
    try:
        found: object = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception:  # whatever importing somebody's module raises
        return f"{module}.{name}"
    return found


def operator_path(operator: object) -> list[str]:
    """Return namespace, name and overload under which ``torch.ops`` has an operator; empty for anything else."""
    if isinstance(operator, OpOverload):
        return [operator.namespace, operator._opname, operator._overloadname]
    if isinstance(operator, OpOverloadPacket):
        return operator._qualified_op_name.split("::")
    return ["higher_order", operator.__name__] if isinstance(operator, HigherOrderOperator) else []


def load_operator(*path: str) -> object:
    """Return the operator with this namespace, name and overload.

    Raises:
        FxoptError: no such operator is registered in this process.
    """
    operator = _find_operator(list(path))
    if operator is None:
        name = ".".join(path)
        raise FxoptError(
            f"the pickled graph calls operator torch.ops.{name}, which is not registered here; import the package that "
            "registers it, then load again"
        )
    return operator


def _find_operator(path: list[str]) -> object:
    found: object = torch.ops
    for name in path:
        found = getattr(found, name, None)
    return found


def spec_reference(spec: TreeSpec) -> Rebuilt:
    """Return what stands for a pytree specification; pickled as it is, its leaves warn of a deprecated class."""
    if spec.is_leaf():
        return Rebuilt(treespec_leaf)
    return Rebuilt(TreeSpec, spec.type, spec.context, [spec_reference(child) for child in spec.children()])
