"""A plugin as a module, as `plugin_cases.py` has it checked."""

from __future__ import annotations

from fxopt_core import Transformation, hookimpl


@hookimpl
def fxopt_transformations() -> list[type[Transformation]]:
    """Return nothing."""
    return []


@hookimpl
def fxopt_pipelines() -> dict[str, str]:
    """Return nothing."""
    return {}
