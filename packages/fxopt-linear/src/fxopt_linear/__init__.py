"""fxopt passes on linear layers: merge siblings, fuse biases."""

from fxopt_linear.fuse_bias import FuseBiasInLinear
from fxopt_linear.merge_linears import MergeLinears

__version__ = "0.1.0"

__all__ = ["FuseBiasInLinear", "MergeLinears"]
