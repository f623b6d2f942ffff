"""What the entry point names: the passes, and a pipeline in which they run with those of other families."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fxopt_core import Transformation, hookimpl


@hookimpl
def fxopt_transformations() -> Iterable[type[Transformation]]:
    """Return the passes of this distribution."""
    from fxopt_attention import FoldQueryScale, RemoveDropout

    return (RemoveDropout, FoldQueryScale)


@hookimpl
def fxopt_pipelines() -> Mapping[str, str]:
    """Return what is worth running together: the division becomes a product, and the product a part of the weight."""
    return {"attention": "remove-dropout,change-true-div-to-mul-by-inverse,fold-query-scale,merge-linears"}
