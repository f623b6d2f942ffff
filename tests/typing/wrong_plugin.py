"""A plugin as a module: one hook has a parameter, one is misspelt. `plugin_cases.py` expects mypy to say so."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fxopt_core import Transformation, hookimpl


@hookimpl
def fxopt_transformations(config: object) -> Iterable[type[Transformation]]:
    """Return nothing, and ask for what nobody gives."""
    return []


@hookimpl
def fxopt_pipeline() -> Mapping[str, str]:
    """Return nothing, under a name that nobody asks for."""
    return {}
