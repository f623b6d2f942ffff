"""What the entry point names: the passes, a layer that one of them puts in, and a pipeline with passes of others."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fxopt_core import Transformation, hookimpl

if TYPE_CHECKING:
    from torch import nn


@hookimpl
def fxopt_transformations() -> Iterable[type[Transformation]]:
    """Return the passes of this distribution."""
    from fxopt_attention import FoldQueryScale, FuseQueryScale, RemoveDropout

    return (RemoveDropout, FoldQueryScale, FuseQueryScale)


@hookimpl
def fxopt_pipelines() -> Mapping[str, str]:
    """Return what is worth running together: the division becomes a product, and the product a part of the weight."""
    return {"attention": "remove-dropout,change-true-div-to-mul-by-inverse,fold-query-scale,merge-linears"}


@hookimpl
def fxopt_layers() -> Iterable[type[nn.Module]]:
    """Return the layer that files may hold."""
    from fxopt_attention import ScaledLinear

    return (ScaledLinear,)
