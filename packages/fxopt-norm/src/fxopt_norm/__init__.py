"""fxopt passes that fold batch norm into convolutions and linear layers, and merge parallel convolutions."""

from fxopt_norm.branches import MergeParallelConvolutions
from fxopt_norm.convolutions import (
    FuseBatchNorm1dInConv1d,
    FuseBatchNorm2dInConv2d,
    FuseBatchNorm3dInConv3d,
    FuseBatchNormInConvTranspose,
)
from fxopt_norm.linear import FuseBatchNorm1dInLinear

__version__ = "0.1.0"

__all__ = [
    "FuseBatchNorm1dInConv1d",
    "FuseBatchNorm1dInLinear",
    "FuseBatchNorm2dInConv2d",
    "FuseBatchNorm3dInConv3d",
    "FuseBatchNormInConvTranspose",
    "MergeParallelConvolutions",
]
