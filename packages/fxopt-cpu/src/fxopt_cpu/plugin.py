"""Entry point of the family: what the registry loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from fxopt_core import Transformation, hookimpl

if TYPE_CHECKING:
    from torch import nn


@hookimpl
def fxopt_transformations() -> Iterable[type[Transformation]]:
    """Return the passes for inference on a CPU."""
    import fxopt_cpu as cpu

    return (cpu.FuseAttention, cpu.FuseNorms, cpu.FuseLinears, cpu.FuseConvolutions, cpu.PlanRegions)


@hookimpl
def fxopt_pipelines() -> Mapping[str, str]:
    """Return the pipelines for models on a CPU, which run passes of fxopt-simplify, fxopt-norm and fxopt-linear first.

    Those that approximate round the layers that are worth it, and leave the others in float32.
    """
    # Attention first: tables of sizes hide that masks are finite, and layers that share a mask add it up once.
    prepared = "fuse-scaled-dot-product-attention,fold-batch-norm,simplify,fuse-activations,merge-linears"
    # These passes are from other families. A missing one is an error, so that the name of a pipeline has one meaning.
    prepared = f"remove-no-ops,fold-weights,fuse-products,{prepared}"
    fused, half = "fuse-attention,fuse-norms", "fuse-attention{products='bfloat16'},fuse-norms"
    packed = "fuse-linears,fuse-convolutions,plan-regions"
    rounded = {
        "int8": "fuse-linears{weights='int8'},fuse-convolutions{weights='int8'}",
        "int8-static": "fuse-linears{weights='int8' activations='static'},"
        "fuse-convolutions{weights='int8' activations='static'},"
        "fuse-linears{weights='int8'},fuse-convolutions{weights='int8'}",  # what calibration gave too few rows
        "bf16": "fuse-linears{weights='bfloat16'}",
    }
    return {
        "kernels": f"fuse-scaled-dot-product-attention,{fused},fuse-linears",
        "cpu-inference": f"{prepared},{fused},{packed}",
        **{f"cpu-inference-{name}": f"{prepared},{half},{first},{packed}" for name, first in rounded.items()},
    }


@hookimpl
def fxopt_layers() -> Iterable[type[nn.Module]]:
    """Return the layers that stand for several calls, and those with packed or rounded weights."""
    from fxopt_cpu.regions.finding import CONVOLUTIONS, LAYERS

    return (*LAYERS, *CONVOLUTIONS)
