"""Entry point of the family: what the registry loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fxopt_core import Transformation, hookimpl

if TYPE_CHECKING:
    from torch import nn


@hookimpl
def fxopt_transformations() -> Iterable[type[Transformation]]:
    """Return the passes that use the kernels."""
    import fxopt_kernels

    return (
        fxopt_kernels.FuseAttention,
        fxopt_kernels.FuseNorms,
        fxopt_kernels.FuseLinears,
        fxopt_kernels.PlanRegions,
    )


@hookimpl
def fxopt_pipelines() -> Mapping[str, str]:
    """Return the pipeline of them, for graphs whose layers are merged; its first pass is fxopt-simplify's."""
    return {"kernels": "fuse-scaled-dot-product-attention,fuse-attention,fuse-norms,fuse-linears"}


@hookimpl
def fxopt_layers() -> Iterable[type[nn.Module]]:
    """Return the layers that stand for several calls."""
    import fxopt_kernels as kernels

    attention = kernels.MergedAttention, kernels.RowAttention
    return (kernels.PanelLinear, *attention, kernels.SumNorm, kernels.EmbeddingNorm)
