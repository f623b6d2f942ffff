"""Entry point of the family: what the registry loads."""

from __future__ import annotations

from collections.abc import Iterable

from fxopt_core import Transformation, hookimpl


@hookimpl
def fxopt_transformations() -> Iterable[type[Transformation]]:
    """Return the passes on linear layers."""
    from fxopt_linear.fuse_bias import FuseBiasInLinear
    from fxopt_linear.merge_linears import MergeLinears

    return (MergeLinears, FuseBiasInLinear)
