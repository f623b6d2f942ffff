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
    """Return the passes for inference on a CPU."""
    import fxopt_onednn

    return (
        fxopt_onednn.ConvertToChannelsLast,
        fxopt_onednn.PackConvolutions,
        fxopt_onednn.PackLinears,
        fxopt_onednn.FuseRegions,
    )


@hookimpl
def fxopt_pipelines() -> Mapping[str, str]:
    """Return the pipeline for models on a CPU; it begins with passes of fxopt-simplify, fxopt-norm and fxopt-linear.

    Where fxopt-kernels is installed, its passes come before those that pack what is left.
    """
    prepared = ["remove-no-ops", "fuse-products", "fold-batch-norm", "simplify", "fuse-activations", "merge-linears"]
    packed = ["convert-to-channels-last", "pack-convolutions", "pack-linears"]
    if entry_points(group="fxopt", name="kernels"):
        prepared, packed = [*prepared, "kernels"], [*packed, "plan-regions"]
    return {"cpu-inference": ",".join([*prepared, *packed, "fuse-regions"])}


@hookimpl
def fxopt_layers() -> Iterable[type[nn.Module]]:
    """Return the layers with packed weights."""
    import fxopt_onednn

    return (fxopt_onednn.PackedConv2d, fxopt_onednn.PackedLinear)
