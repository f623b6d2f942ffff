"""Arguments and targets of nodes as text that is the same in every process: without addresses."""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor
from torch.fx import Node
from torch.fx.node import map_aggregate
from torch.nn.parameter import is_lazy

from fxopt_core import name_of

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


class _Text(str):
    """Text that stands for a value in the ``repr`` of what holds it."""

    __slots__ = ()
    __repr__ = str.__str__


def text_of(value: Any) -> str:
    """Return an argument as text: ``%name`` for a node, a short readable form for other values.

    >>> import torch
    >>> text_of((1, torch.float32, torch.zeros(2, 3), slice(None, 2), torch.relu))
    '(1, torch.float32, tensor float32[2, 3], slice(None, 2, None), torch.relu)'
    """
    return repr(map_aggregate(value, _leaf))


def _leaf(value: object) -> _Text:
    if isinstance(value, Node):
        return _Text(f"%{value.name}")
    if isinstance(value, Tensor):
        shape = "[?]" if is_lazy(value) else list(value.shape)
        return _Text(f"tensor {str(value.dtype).removeprefix('torch.')}{shape}")
    return _Text(target_text(value) if callable(value) else without_addresses(repr(value)))


def target_text(target: object) -> str:
    """Return the name of a target: the path of a module or attribute, or the qualified name of a function.

    >>> import operator, torch
    >>> target_text("layer.0"), target_text(operator.add), target_text(torch.ops.aten.relu.default)
    ('layer.0', 'operator.add', 'aten.relu.default')
    """
    if isinstance(target, str):
        return target
    known = name_of(target)
    if known is None:  # a function inside of another one
        return without_addresses(str(target))
    # Without the underscore: `operator.add` is defined in `_operator`.
    return known.replace(":", ".").removeprefix("torch.ops.").removeprefix("_")


def without_addresses(text: str) -> str:
    """Remove addresses from a text, as in ``<object object at 0x7f00>``."""
    return _ADDRESS.sub("", text)
