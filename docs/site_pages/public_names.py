"""Where a user imports a class or function from."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType


def public_module(value: object) -> str | None:
    """Return the package to import a class or function from: the outermost one that has it; None where none has.

    >>> from fxopt_core.ledger.records import Record
    >>> public_module(Record)
    'fxopt_core'
    """
    module, name = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
    if not isinstance(module, str) or "." in name:
        return None
    parts = module.split(".")
    for depth in range(1, len(parts) + 1):
        path = ".".join(parts[:depth])
        if getattr(_imported(path), name, None) is value:
            return path
    return None


def import_line(name: str, value: object) -> str | None:
    """Return the line that gives a module, class or function this name; None where there is none.

    >>> import torch
    >>> import_line("torch", torch), import_line("nn", torch.nn), import_line("Conv", torch.nn.Conv2d)
    ('import torch', 'from torch import nn', None)
    """
    if isinstance(value, ModuleType):
        parent, _, own = value.__name__.rpartition(".")
        plain = f"import {own}" if not parent else f"from {parent} import {own}"
        return plain if own == name else f"import {value.__name__} as {name}"
    module = public_module(value)
    return f"from {module} import {name}" if module is not None and getattr(value, "__name__", "") == name else None


def _imported(path: str) -> ModuleType | None:
    if path in sys.modules:
        return sys.modules[path]
    try:
        return importlib.import_module(path)
    except ImportError:
        return None
