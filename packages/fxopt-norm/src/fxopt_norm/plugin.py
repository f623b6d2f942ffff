"""Entry point of the family: what the registry loads."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fxopt_core import Transformation, hookimpl


@hookimpl
def fxopt_transformations() -> Iterable[type[Transformation]]:
    """Return the folds of batch norm, and the merge of parallel convolutions."""
    import fxopt_norm

    return (
        fxopt_norm.MergeParallelConvolutions,
        fxopt_norm.FuseBatchNorm2dInConv2d,
        fxopt_norm.FuseBatchNorm1dInConv1d,
        fxopt_norm.FuseBatchNorm3dInConv3d,
        fxopt_norm.FuseBatchNormInConvTranspose,
        fxopt_norm.FuseBatchNorm1dInLinear,
    )


@hookimpl
def fxopt_pipelines() -> Mapping[str, str]:
    """Return the pipeline of all of them; a batch norm after a sum folds once the sum is one convolution."""
    folds = ["2d-in-conv2d", "1d-in-conv1d", "3d-in-conv3d", "-in-conv-transpose", "1d-in-linear"]
    return {"fold-batch-norm": ",".join(["merge-parallel-convolutions", *(f"fuse-batch-norm{fold}" for fold in folds)])}
