"""fxopt passes for CPU inference of convolutional models: layout, prepacked weights, fused activations."""

from fxopt_onednn.activations import Activation
from fxopt_onednn.channels_last import ConvertToChannelsLast
from fxopt_onednn.fuse_regions import FuseRegions
from fxopt_onednn.identities import RemoveIdentities
from fxopt_onednn.pack_convolutions import PackConvolutions
from fxopt_onednn.pack_linears import PackLinears
from fxopt_onednn.packed_conv import PackedConv2d
from fxopt_onednn.packed_linear import PackedLinear

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "ConvertToChannelsLast",
    "FuseRegions",
    "PackConvolutions",
    "PackLinears",
    "PackedConv2d",
    "PackedLinear",
    "RemoveIdentities",
]
