"""Entry point of the family: what the registry loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
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
    ways = {"cpu-inference-int8": "quantize-linears", "cpu-inference-bf16": "cast-to-bfloat16"}
    return {name: f"fold-batch-norm,merge-linears,{way},cpu-inference" for name, way in ways.items()}


@hookimpl
def fxopt_layers() -> Iterable[type[nn.Module]]:
    """Return the layer with rounded weights."""
    import fxopt_quantize

    return (fxopt_quantize.QuantizedLinear,)
