"""fxopt passes that fold normalisations and constants into convolutions and linear layers."""

from fxopt_norm.convolutions import (
    FuseBatchNorm1dInConv1d,
    FuseBatchNorm2dInConv2d,
    FuseBatchNorm3dInConv3d,
    FuseBatchNormInConvTranspose,
)
from fxopt_norm.layer_norm import FoldLayerNormAffine
from fxopt_norm.linear import FuseBatchNorm1dInLinear
from fxopt_norm.scale import FoldScaleInConv, FoldScaleInLinear

__version__ = "0.1.0"

__all__ = [
    "FoldLayerNormAffine",
    "FoldScaleInConv",
    "FoldScaleInLinear",
    "FuseBatchNorm1dInConv1d",
    "FuseBatchNorm1dInLinear",
    "FuseBatchNorm2dInConv2d",
    "FuseBatchNorm3dInConv3d",
    "FuseBatchNormInConvTranspose",
]
