"""Entry point of core: the two passes that need no family."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from fxopt_core.registry.hookspec import hookimpl

if TYPE_CHECKING:
    from fxopt_core.passes.transformation import Transformation


@hookimpl
def fxopt_transformations() -> Iterable[type[Transformation]]:
    """Return the passes that need no family."""
    from fxopt_core.passes.compose import DeepCopy, LintAndRecompile

    return (DeepCopy, LintAndRecompile)
