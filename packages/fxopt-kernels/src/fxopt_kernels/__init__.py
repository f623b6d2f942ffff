"""Kernels for inference on a CPU, and the passes that use them."""

from fxopt_kernels.layers.attention import MergedAttention, RowAttention
from fxopt_kernels.layers.norms import EmbeddingNorm, SumNorm
from fxopt_kernels.layers.panel_linear import PanelLinear
from fxopt_kernels.library import isa
from fxopt_kernels.passes.fuse_attention import FuseAttention
from fxopt_kernels.passes.fuse_linears import FuseLinears
from fxopt_kernels.passes.fuse_norms import FuseNorms
from fxopt_kernels.passes.plan_regions import PlanRegions

__version__ = "0.1.0"

__all__ = [
    "EmbeddingNorm",
    "FuseAttention",
    "FuseLinears",
    "FuseNorms",
    "MergedAttention",
    "PanelLinear",
    "PlanRegions",
    "RowAttention",
    "SumNorm",
    "isa",
]
