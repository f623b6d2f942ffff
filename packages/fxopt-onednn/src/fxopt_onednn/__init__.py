"""fxopt passes for CPU inference: memory layout, prepacked weights, fused activations."""

from fxopt_onednn.fuse_regions.fuse_regions import FuseRegions
from fxopt_onednn.layout.channels_last import ConvertToChannelsLast
from fxopt_onednn.packing.activations import Activation
from fxopt_onednn.packing.pack_convolutions import PackConvolutions
from fxopt_onednn.packing.pack_linears import PackLinears
from fxopt_onednn.packing.packed_conv import PackedConv2d
from fxopt_onednn.packing.packed_linear import PackedLinear

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "ConvertToChannelsLast",
    "FuseRegions",
    "PackConvolutions",
    "PackLinears",
    "PackedConv2d",
    "PackedLinear",
]
