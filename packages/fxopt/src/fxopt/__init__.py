"""Fewer and faster operations in PyTorch graphs, with proof: one import for all of fxopt.

Everything that the packages offer resolves here, each on first use: ``from fxopt import MergeLinears, symbolic_trace``
loads the families that it names and no others.
"""

from __future__ import annotations

import ast
import importlib
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from _fxopt_entry_points import autoload

__version__ = "0.1.0"

#: The modules whose ``__all__`` is offered here; for type checkers, `__init__.pyi` imports from the same ones.
_HOMES = (
    "fxopt_core",
    "fxopt_rewrite",
    "fxopt_checkpoints",
    "fxopt_linear",
    "fxopt_norm",
    "fxopt_arith",
    "fxopt_cpu",
    "fxopt_simplify",
    "fxopt_capture",
    "fxopt_compile.torch_passes",
    "fxopt_tools",
    "fxopt_testing",
    "fxopt_report",
    "fxopt.guarded_graphs",
    "fxopt.optimization",
    "fxopt.drop_in.batches",
)

#: Those that extras bring: pytest, for authors of passes, and igraph, which is under the GPL.
_EXTRAS = {"fxopt_testing": "testing", "fxopt_report": "reports"}


def __getattr__(name: str) -> object:
    """Load a name from its home."""
    if name == "__all__":
        return sorted(_home_of_names())
    home = _home_of_names().get(name)
    if home is None:
        absent = {home: extra for home, extra in _EXTRAS.items() if find_spec(home) is None}
        hints = (
            f"; if it is one of {home}, which is not installed: pip install 'fxopt[{extra}]'"
            for home, extra in absent.items()
        )
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}{''.join(hints)}")
    value: object = getattr(importlib.import_module(home), name)
    # From now on Python finds the name without calling `__getattr__`.
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Return all names, loaded or not."""
    return sorted({*globals(), *_home_of_names()})


@cache
def _home_of_names() -> dict[str, str]:
    return {name: home for home in _HOMES for name in _names_of(home)}


def _names_of(home: str) -> list[str]:
    """Return the ``__all__`` of a module, read from its source.

    Importing the homes to ask them would load torch, every family and pytest.
    """
    spec = find_spec(home)
    if spec is None or spec.origin is None:
        return []  # it is not installed
    for statement in ast.parse(Path(spec.origin).read_text(encoding="utf-8")).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == "__all__":
            return list(ast.literal_eval(statement.value))
    return []


autoload()  # as the entry point of torch does, which may be turned off
