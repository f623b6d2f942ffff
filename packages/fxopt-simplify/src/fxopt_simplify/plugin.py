"""Entry point of the family: what the registry loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fxopt_core import Transformation, hookimpl

if TYPE_CHECKING:
    from torch import nn


@hookimpl
def fxopt_transformations() -> Iterable[type[Transformation]]:
    """Return the passes that make graphs smaller."""
    import fxopt_simplify

    return (
        fxopt_simplify.RemoveNoOps,
        fxopt_simplify.EliminateCommonSubexpressions,
        fxopt_simplify.FoldConstants,
        fxopt_simplify.FoldWeights,
        fxopt_simplify.CacheShapeTables,
        fxopt_simplify.EliminateDeadCode,
        fxopt_simplify.FuseActivations,
        fxopt_simplify.FuseProducts,
        fxopt_simplify.FuseScaledDotProductAttention,
    )


@hookimpl
def fxopt_pipelines() -> Mapping[str, str]:
    """Return the pipeline of those that keep every bit, in the order in which each finds the most."""
    # Without `fold-constants`: the tables of `cache-shape-tables` include values that depend on no size.
    smaller = ["remove-no-ops", "eliminate-common-subexpressions", "eliminate-dead-code"]
    return {"simplify": ",".join([*smaller, "cache-shape-tables"])}


@hookimpl
def fxopt_layers() -> Iterable[type[nn.Module]]:
    """Return the module that keeps tables of sizes."""
    import fxopt_simplify

    return (fxopt_simplify.ShapeTables,)
