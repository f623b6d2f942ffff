"""The page of operations: the names that readers return, their arguments, and the forms that are read as them."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from fxopt_rewrite.ops.names import MISSING
from fxopt_rewrite.ops.vocabulary import MODULES, SYNONYMS, called_function, called_method, plain, signature_of

_INTRODUCTION = """\
# Operations

`read_operation(index, node)` returns an `Operation`. Its `name` and `arguments` are listed here, whichever form the
graph has: function, method, `torch.ops.aten` operator, in-place form, or what the last column names. The page is made
from the installed torch.
"""
_HELPERS = ("assert_int_or_pair", "boolean_dispatch", "handle_torch_function")


def operations_page() -> str:
    """Return the page as Markdown, with a row for each operation."""
    forms: defaultdict[str, list[str]] = defaultdict(list)
    for name, form in [*_named(), *((name, f"nn.{cls.__name__}") for cls, name in MODULES.items())]:
        forms[name] += [f"`{form}`"] if form and f"`{form}`" not in forms[name] else []
    for other, name in SYNONYMS.items():
        forms[name].append(f"`{other}`")
    rows = (f"| `{name}` | {_arguments(name)} | {', '.join(forms[name])} |" for name in sorted(forms))
    return _INTRODUCTION + "\n".join(["\n| name | arguments | also |", "|---|---|---|", *rows]) + "\n"


def _named() -> Iterator[tuple[str, str]]:
    """Yield the name of each function and method that is an operation, and Python's operator for it, or ""."""
    for module in (torch, F, operator):
        for key, value in vars(module).items():
            if key.startswith("_") or key in _HELPERS or not callable(value) or isinstance(value, type):
                continue
            found = called_function(value)
            if found is not None and module is operator and not found.inplace:
                yield found.name, f"operator.{key}"
            elif found is not None and found.name == key:
                yield key, ""
    for key in dir(torch.Tensor):
        found = None if key.startswith("_") else called_method(key)
        if found is not None and found.name == key:
            yield key, ""


def _arguments(name: str) -> str:
    defaults = {key: plain(name, key, value) for key, value in signature_of(name).items()}
    shown = (key if value is MISSING else f"{key}={value!r}" for key, value in defaults.items())
    return f"`{', '.join(shown)}`"
