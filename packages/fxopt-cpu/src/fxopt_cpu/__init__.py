"""fxopt passes for CPU inference: packed layers, operators of our own, regions that run as one call."""

from fxopt_cpu.layers.attention import MergedAttention, RowAttention
from fxopt_cpu.layers.epilogue import Activation
from fxopt_cpu.layers.norms import EmbeddingNorm, SumNorm
from fxopt_cpu.layers.packed_conv import PackedConv1d, PackedConv2d
from fxopt_cpu.layers.panel_linear import PanelLinear
from fxopt_cpu.layers.quantized_conv import QuantizedConv1d, QuantizedConv2d
from fxopt_cpu.library import isa
from fxopt_cpu.passes.calibration import calibrated
from fxopt_cpu.passes.fuse_attention import FuseAttention
from fxopt_cpu.passes.fuse_convolutions import FuseConvolutions
from fxopt_cpu.passes.fuse_linears import FuseLinears
from fxopt_cpu.passes.fuse_norms import FuseNorms
from fxopt_cpu.passes.plan_regions import PlanRegions

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "EmbeddingNorm",
    "FuseAttention",
    "FuseConvolutions",
    "FuseLinears",
    "FuseNorms",
    "MergedAttention",
    "PackedConv1d",
    "PackedConv2d",
    "PanelLinear",
    "PlanRegions",
    "QuantizedConv1d",
    "QuantizedConv2d",
    "RowAttention",
    "SumNorm",
    "calibrated",
    "isa",
]
