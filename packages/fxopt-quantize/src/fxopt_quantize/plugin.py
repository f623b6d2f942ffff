"""Entry point of the family: what the registry loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from importlib.metadata import entry_points
from typing import TYPE_CHECKING

from fxopt_core import Transformation, hookimpl

if TYPE_CHECKING:
    from torch import nn


@hookimpl
def fxopt_transformations() -> Iterable[type[Transformation]]:
    """Return the passes that approximate."""
    import fxopt_quantize

    return (fxopt_quantize.QuantizeLinears, fxopt_quantize.CastToBfloat16)


@hookimpl
def fxopt_pipelines() -> Mapping[str, str]:
    """Return the pipelines: what has to come before rounding, then all of ``cpu-inference`` for what is left."""
    rounds_inputs = bool(entry_points(group="fxopt", name="kernels"))  # fxopt-kernels, whose operators do
    apart = "{join-linears=False}" if rounds_inputs else ""
    ways = {
        "cpu-inference-int8": "quantize-linears",
        "cpu-inference-int8-static": "quantize-linears{activations='static'}",
        "cpu-inference-bf16": f"cast-to-bfloat16{apart}",
    }
    return {name: f"fuse-products,fold-batch-norm,merge-linears,{way},cpu-inference" for name, way in ways.items()}


@hookimpl
def fxopt_layers() -> Iterable[type[nn.Module]]:
    """Return the layer with rounded weights."""
    import fxopt_quantize

    return (fxopt_quantize.QuantizedLinear,)
