"""Entry point of the family: what the registry loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fxopt_core import Transformation, hookimpl


@hookimpl
def fxopt_transformations() -> Iterable[type[Transformation]]:
    """Return the passes that approximate."""
    import fxopt_quantize

    return (fxopt_quantize.QuantizeLinears,)


@hookimpl
def fxopt_pipelines() -> Mapping[str, str]:
    """Return the pipelines: what has to come before rounding, then all of ``cpu-inference`` for what is left."""
    return {"cpu-inference-int8": "fold-batch-norm,merge-linears,quantize-linears,cpu-inference"}
