"""Passes for attention in eval mode, published by a third party: dropout goes, scales become part of weights."""

from fxopt_attention.dropout import RemoveDropout
from fxopt_attention.scaled_linear import FuseQueryScale, ScaledLinear
from fxopt_attention.scaling import FoldQueryScale

__version__ = "0.1.0"

__all__ = ["FoldQueryScale", "FuseQueryScale", "RemoveDropout", "ScaledLinear"]
