"""Completion in shells: passes, pipelines, and the options of passes inside their braces."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import redirect_stdout

Completions = list[tuple[str, str]]


def complete_pass(incomplete: str) -> Completions:
    """Return the passes and pipelines that begin with a text, each with its summary."""
    return [(name, summary) for name, summary in _names() if name.startswith(incomplete)]


def complete_family(incomplete: str) -> list[str]:
    """Return the families that begin with a text."""
    from fxopt_core import registry

    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        families = sorted({info.family for info in registry().available().values()})
    return [family for family in families if family.startswith(incomplete)]


def complete_pipeline(incomplete: str) -> Completions:
    """Return how the text of a pipeline may continue: another name after a comma, an option inside braces."""
    closed = incomplete.rfind("}")
    opened = incomplete.find("{", closed + 1)
    if opened >= 0:
        return list(_options(incomplete, opened))
    start = incomplete.rfind(",", max(closed, 0)) + 1
    return [(incomplete[:start] + name, summary) for name, summary in complete_pass(incomplete[start:])]


def _options(incomplete: str, opened: int) -> Iterator[tuple[str, str]]:
    from fxopt_core import option_text, registry, show_annotation

    name = incomplete[:opened].rpartition(",")[2].strip()
    info = registry().available().get(name)
    start = max(incomplete.rfind(" "), opened) + 1
    for option in info.options.values() if info is not None else ():
        text = f"{option_text(option.name)}="
        if text.startswith(incomplete[start:]):
            yield incomplete[:start] + text, show_annotation(option.annotation)


def _names() -> list[tuple[str, str]]:
    from fxopt_core import registry

    with open(os.devnull, "w", encoding="utf-8") as nowhere, redirect_stdout(nowhere):
        passes = [(name, info.summary) for name, info in registry().available().items()]
        return passes + list(registry().pipelines().items())
