"""Entry point of the family: what the registry loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fxopt_core import Transformation, hookimpl


@hookimpl
def fxopt_transformations() -> Iterable[type[Transformation]]:
    """Return the passes that make graphs smaller."""
    import fxopt_simplify

    return (
        fxopt_simplify.RemoveNoOps,
        fxopt_simplify.EliminateCommonSubexpressions,
        fxopt_simplify.FoldConstants,
        fxopt_simplify.CacheShapeTables,
        fxopt_simplify.EliminateDeadCode,
        fxopt_simplify.FuseScaledDotProductAttention,
    )


@hookimpl
def fxopt_pipelines() -> Mapping[str, str]:
    """Return the pipeline of those that keep every bit, in the order in which each finds the most."""
    smaller = ["remove-no-ops", "eliminate-common-subexpressions", "eliminate-dead-code"]
    return {"simplify": ",".join([*smaller, "cache-shape-tables"])}
