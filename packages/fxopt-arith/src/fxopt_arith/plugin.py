"""Entry point of the family: what the registry loads."""

from __future__ import annotations

from collections.abc import Iterable

from fxopt_core import Transformation, hookimpl


@hookimpl
def fxopt_transformations() -> Iterable[type[Transformation]]:
    """Return the passes on arithmetic."""
    from fxopt_arith.true_division import ChangeTrueDivToMulByInverse

    return (ChangeTrueDivToMulByInverse,)
