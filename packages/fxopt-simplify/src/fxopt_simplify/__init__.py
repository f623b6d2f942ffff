"""fxopt passes that make graphs smaller: no-ops, repeated calls, constants and tables, dead code, fused functions."""

from fxopt_simplify.attention.fuse import FuseScaledDotProductAttention
from fxopt_simplify.cache_shape_tables import CacheShapeTables
from fxopt_simplify.eliminate_common_subexpressions import EliminateCommonSubexpressions
from fxopt_simplify.eliminate_dead_code import EliminateDeadCode
from fxopt_simplify.fold_constants import FoldConstants
from fxopt_simplify.fold_weights import FoldWeights
from fxopt_simplify.fuse_activations import FuseActivations
from fxopt_simplify.fuse_products import FuseProducts
from fxopt_simplify.remove_no_ops import RemoveNoOps
from fxopt_simplify.shape_tables import ShapeTables

__version__ = "0.1.0"

__all__ = [
    "CacheShapeTables",
    "EliminateCommonSubexpressions",
    "EliminateDeadCode",
    "FoldConstants",
    "FoldWeights",
    "FuseActivations",
    "FuseProducts",
    "FuseScaledDotProductAttention",
    "RemoveNoOps",
    "ShapeTables",
]
