"""The installed families together: what the registry offers, and what passes that approximate promise."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxopt_core import history, registry

APPROXIMATE = [
    "fuse-linears{weights='int8' min-weights=1}",
    "fuse-linears{weights='bfloat16'}",
    "fuse-convolutions{weights='int8' min-weights=1 min-channels=1}",
]


@pytest.mark.parametrize("text", APPROXIMATE)
def test_a_pass_that_approximates_keeps_its_promise(text: str) -> None:
    """The ratio of signal to error is no smaller than what it declares."""
    convolutions = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()
    model = nn.Sequential(*convolutions, nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4)).eval()
    transformation = registry().pipeline(text)
    transformed = transformation(torch.fx.symbolic_trace(model))
    if "no-operators" in {refusal.reason for refusal in history(transformed)[-1].refusals}:
        pytest.skip("this processor has no instructions for bfloat16")
    assert history(transformed)[-1].rewrites
    images = torch.randn(4, 3, 9, 9)
    with torch.no_grad():
        found, expected = transformed(images), model(images)
    ratio = 10 * torch.log10(expected.square().sum() / (found - expected).square().sum())
    assert transformation.promised_sqnr is not None
    assert ratio > transformation.promised_sqnr
