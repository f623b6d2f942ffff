"""Completion in shells: passes, pipelines and families."""

from __future__ import annotations

import os
from contextlib import redirect_stdout
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxopt_core import Registry

Completions = list[tuple[str, str]]


def complete_pass(incomplete: str) -> Completions:
    """Return the passes and pipelines that begin with a text, each with its summary."""
    names = {name: info.summary for name, info in _registry().available().items()} | dict(_registry().pipelines())
    return [(name, summary) for name, summary in names.items() if name.startswith(incomplete)]


def complete_family(incomplete: str) -> list[str]:
    """Return the families that begin with a text."""
    families = {info.family for info in _registry().available().values()}
    return sorted(family for family in families if family.startswith(incomplete))


def complete_pipeline(incomplete: str) -> Completions:
    """Return how the text of a pipeline may continue: with another name after a comma."""
    start = incomplete.rfind(",") + 1
    return [(incomplete[:start] + name, summary) for name, summary in complete_pass(incomplete[start:])]


def _registry() -> Registry:
    """Return the registry, loaded: what plugins print meanwhile is no completion."""
    from fxopt_core import registry

    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        registry().available()
    return registry()
