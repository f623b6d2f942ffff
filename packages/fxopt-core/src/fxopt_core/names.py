"""Functions, classes and operators by name: ``"module:qualified.name"``, or ``"torch:ops.namespace.name.overload"``."""

from __future__ import annotations

import importlib
import inspect
import sys
import types
from collections.abc import Callable
from contextlib import suppress
from functools import reduce
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket

from fxopt_core.errors import FxoptError

#: What names of torch's operators begin with; namespace, name and overload follow, separated by dots.
OPERATORS = "torch:ops."


# -- names of objects


def class_path(cls: type) -> str:
    """Return ``"module:qualified.name"`` of a class.

    >>> class_path(int)
    'builtins:int'
    """
    return f"{cls.__module__}:{cls.__qualname__}"


def name_of(value: Any) -> str | None:
    """Return the name of a function, a class or an operator; None if it cannot be found by name.

    >>> name_of(torch.conv2d), name_of(torch.ops.aten.add.Tensor), name_of(lambda: 0)
    ('torch:conv2d', 'torch:ops.aten.add.Tensor', None)
    >>> name_of(torch.nn.Linear)
    'torch.nn.modules.linear:Linear'
    """
    path = operator_path(value)
    if path:
        return OPERATORS + ".".join(path) if _find_operator(path) is value else None
    if value is type(None):
        return "types:NoneType"
    if not callable(value) or not hasattr(value, "__qualname__"):
        return None
    # Methods of C types name their class, class methods are bound to it; other functions name their module.
    owner = getattr(value, "__objclass__", None) or getattr(value, "__self__", None)
    module, own = getattr(value, "__module__", None), getattr(value, "__name__", None)
    candidates = [f"{class_path(owner)}.{own}"] if isinstance(owner, type) else []
    for name in (*candidates, f"{module}:{value.__qualname__}", f"{module}:{own}"):
        try:
            found = _find(name, sys.modules.__getitem__)
        except Exception:  # a module or class that computes its attributes
            continue
        # A name may lead to another object, such as the wrapper of a decorator; then it does not name this one. A bound
        # method is made anew by each look-up, so it is compared by value.
        if found is value or (isinstance(value, types.MethodType) and found == value):
            return name
    return None


def describe(value: object) -> str:
    """Describe a value for a message, without printing contents that may be long.

    >>> describe(describe), describe(3)
    ('function fxopt_core.names.describe', 'a value of type int')
    """
    name = getattr(value, "__qualname__", None)
    known = f"{type(value).__name__} {getattr(value, '__module__', None)}.{name}"
    return known if isinstance(name, str) else f"a value of type {type(value).__qualname__}"


def source_of(value: Any) -> str:
    """Return the source code of a function or class, or an empty text if it cannot be read."""
    with suppress(OSError, TypeError):  # built in, or typed in
        return inspect.getsource(value)
    return ""


# -- objects by name


def import_class(name: str) -> Any:
    """Import the class, function or operator with this name; import errors are passed on.

    >>> import_class("math:sqrt")(4.0)
    2.0
    """
    if name.startswith(OPERATORS):
        return load_operator(*name.removeprefix(OPERATORS).split("."))
    return _find(name, importlib.import_module)


def _find(name: str, module_of: Callable[[str], Any]) -> Any:
    module, _, path = name.partition(":")
    return reduce(getattr, path.split("."), module_of(module))


# By path. The class of a pass is looked up here, not imported: the record that names it may come from a stranger.
_KNOWN: WeakValueDictionary[str, type] = WeakValueDictionary()


def note_class(cls: type) -> None:
    """Remember a class while it lives, since a class defined inside a function cannot be imported."""
    _KNOWN[class_path(cls)] = cls


def known_class(path: str) -> type | None:
    """Return the class that was noted last under this path, or None."""
    return _KNOWN.get(path)


def operator_path(value: object) -> list[str]:
    """Return namespace, name and overload under which ``torch.ops`` has an operator; empty for anything else."""
    if isinstance(value, OpOverload):
        return [value.namespace, value._opname, value._overloadname]
    if isinstance(value, OpOverloadPacket):
        return value._qualified_op_name.split("::")
    return ["higher_order", value.__name__] if isinstance(value, HigherOrderOperator) else []


#: Called when an operator is missing; the registry adds a function that imports the plugins.
providers: list[Callable[[], object]] = []


def load_operator(*path: str) -> object:
    """Return the operator with this namespace, name and overload; an `FxoptError` if none is registered here."""
    found = _find_operator(path)
    # torch.ops makes a namespace for any unknown name, so not only None means that there is no operator.
    for provide in providers if not operator_path(found) else ():
        provide()
        found = _find_operator(path)
    if not operator_path(found):
        problem = f"the graph calls operator torch.ops.{'.'.join(path)}, which is not registered here"
        raise FxoptError(f"{problem}; install or import the package that registers it, then load again")
    return found


def _find_operator(path: list[str] | tuple[str, ...]) -> object:
    found: object = torch.ops
    for name in path:
        found = getattr(found, name, None)
    return found
