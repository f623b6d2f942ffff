"""Entry point of the umbrella: the pipelines that go across families."""

from __future__ import annotations

from collections.abc import Mapping

from fxopt_core import hookimpl


@hookimpl
def fxopt_pipelines() -> Mapping[str, str]:
    """Return the pipeline that `fxopt.optimize` runs by default."""
    # Without `fuse-scaled-dot-product-attention`: where scores overflow, it changes results more than reassociated
    # sums do.
    return {"inference": "fold-weights,fuse-products,fold-batch-norm,merge-linears,change-true-div-to-mul-by-inverse"}
