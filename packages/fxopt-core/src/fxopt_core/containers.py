"""Modules that only hold parameters, as in export graphs: torch drops them from copies as soon as they are empty."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from fxopt_core.key_order import KeyOrder
from fxopt_core.ledger_rows import ModuleRow

_PLAIN = frozenset(vars(nn.Module()))


def emptied_row(root: nn.Module, name: str, order_of: Callable[[dict[str, Any]], KeyOrder[Any]]) -> ModuleRow | None:
    """Return what it takes to make a module again that holds nothing any more; None for any other.

    Args:
        root: the graph module.
        name: full name of the module.
        order_of: gives the order of the keys of a dictionary of modules.

    >>> root = nn.Module()
    >>> root.first, root.second = nn.Module(), nn.Linear(1, 1)
    >>> emptied_row(root, "first", KeyOrder), emptied_row(root, "second", KeyOrder)
    (ModuleRow(name='first', ...), None)
    """
    module = root.get_submodule(name)
    if not name or type(module) is not nn.Module or vars(module).keys() != _PLAIN:
        return None
    if module._parameters or module._buffers or module._modules:
        return None
    parent, _, key = name.rpartition(".")
    previous = order_of(root.get_submodule(parent)._modules).before(key)
    return ModuleRow(name, "torch.nn.modules.module:Module", (("training", module.training),), (), previous, None)
