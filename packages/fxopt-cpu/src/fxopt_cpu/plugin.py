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

    return (
        cpu.FuseAttention,
        cpu.FuseNorms,
        cpu.FuseLinears,
        cpu.ConvertToChannelsLast,
        cpu.PackConvolutions,
        cpu.PackLinears,
        cpu.PlanRegions,
        cpu.FuseRegions,
        cpu.QuantizeLinears,
        cpu.CastToBfloat16,
    )


@hookimpl
def fxopt_pipelines() -> Mapping[str, str]:
    """Return the pipelines for models on a CPU, which run passes of fxopt-simplify, fxopt-norm and fxopt-linear first.

    Those that approximate round what has been merged, and do all of ``cpu-inference`` with the rest.
    """
    prepared = "remove-no-ops,fuse-products,fold-batch-norm,simplify,fuse-activations,merge-linears"
    packed = "convert-to-channels-last,pack-convolutions,pack-linears,plan-regions,fuse-regions"
    ways = {
        "cpu-inference-int8": "quantize-linears",
        "cpu-inference-int8-static": "quantize-linears{activations='static'}",
        "cpu-inference-bf16": "cast-to-bfloat16{join-linears=False}",
    }
    rounded = {name: f"fuse-products,fold-batch-norm,merge-linears,{way},cpu-inference" for name, way in ways.items()}
    return {
        "kernels": "fuse-scaled-dot-product-attention,fuse-attention,fuse-norms,fuse-linears",
        "cpu-inference": f"{prepared},kernels,{packed}",
        **rounded,
    }


@hookimpl
def fxopt_layers() -> Iterable[type[nn.Module]]:
    """Return the layers that stand for several calls, and those with packed or rounded weights."""
    import fxopt_cpu as cpu

    attention = cpu.MergedAttention, cpu.RowAttention
    return (
        *(cpu.PanelLinear, *attention, cpu.SumNorm, cpu.EmbeddingNorm),
        *(cpu.PackedConv2d, cpu.PackedLinear, cpu.QuantizedLinear),
    )
