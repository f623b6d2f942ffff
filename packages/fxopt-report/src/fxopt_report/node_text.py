"""Arguments and targets of nodes as text that is the same in every process: without addresses, sets in order."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import BuiltinFunctionType, FunctionType
from typing import Any

from torch import Size, Tensor
from torch._ops import OpOverload
from torch.fx import Node
from torch.nn.parameter import is_lazy

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def text_of(value: object) -> str:
    """Return an argument as text: ``%name`` for a node, a short readable form for other values.

    >>> import torch
    >>> text_of((1, torch.float32, torch.zeros(2, 3), slice(None, 2), torch.relu, {"b", "a"}))
    "(1, torch.float32, tensor float32[2, 3], slice(None, 2, None), torch.relu, {'a', 'b'})"
    """
    if isinstance(value, Node):
        return f"%{value.name}"
    if isinstance(value, Tensor):
        return f"tensor {_tensor(value)}"
    if isinstance(value, (list, tuple, set, frozenset)) and not isinstance(value, Size):
        return _collected(value)
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{text_of(key)}: {text_of(item)}' for key, item in value.items())}}}"
    if isinstance(value, slice):
        return f"slice({text_of(value.start)}, {text_of(value.stop)}, {text_of(value.step)})"
    if isinstance(value, (FunctionType, BuiltinFunctionType, type, OpOverload)):
        return name_of(value)
    return without_addresses(repr(value))


def name_of(target: object) -> str:
    """Return the name of a target: the path of a module or attribute, or the qualified name of a function.

    >>> import operator, torch
    >>> name_of("layer.0"), name_of(operator.add), name_of(torch.ops.aten.relu.default)
    ('layer.0', 'operator.add', 'aten.relu.default')
    """
    if isinstance(target, str):
        return target
    if isinstance(target, BuiltinFunctionType):  # their qualified names in torch contain internal classes
        return f"{_public(target.__module__ or 'torch')}.{target.__name__}"
    if isinstance(target, (FunctionType, type)):
        return f"{_public(target.__module__)}.{target.__qualname__.rpartition('>.')[2]}"
    return without_addresses(str(target))


def _public(module: str) -> str:
    return module.removeprefix("_").partition("._C")[0]


def without_addresses(text: str) -> str:
    """Remove addresses from a text, as in ``<object object at 0x7f00>``."""
    return _ADDRESS.sub("", text)


def _tensor(tensor: Tensor) -> str:
    shape = "?" if is_lazy(tensor) else ", ".join(map(str, tensor.shape))
    device = "" if tensor.device.type == "cpu" else f" {tensor.device}"
    return f"{str(tensor.dtype).removeprefix('torch.')}[{shape}]{device}"


def _collected(value: list[Any] | tuple[Any, ...] | set[Any] | frozenset[Any]) -> str:
    """Return a container as text; torch.fx's immutable lists look like lists."""
    texts = [text_of(item) for item in value]
    if isinstance(value, list):
        return f"[{', '.join(texts)}]"
    if isinstance(value, tuple):
        name = type(value).__name__ if hasattr(value, "_fields") else ""
        return f"{name}({', '.join(texts)}{',' if len(texts) == 1 else ''})"
    return f"{{{', '.join(sorted(texts))}}}"
