"""Transforms of ``torch.func`` over optimized models: the plain path, on any pipeline for CPUs."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from site_passes import Computes
from torch import Tensor, nn

import fxopt

IMAGES = torch.randn(2, 3, 8, 8)
BATCHES = torch.randn(4, 2, 3, 8, 8)


def residual(m: Any, image: Tensor) -> Any:
    """Two convolutions with a sum around one, as ResNets have them."""
    states = torch.relu(m.stem(image))
    return m.head(torch.relu(m.block(states) + states).mean((2, 3)))


@pytest.fixture(scope="module")
def model() -> nn.Module:
    torch.manual_seed(0)
    stem, block = (nn.Sequential(nn.Conv2d(size, 8, 3, padding=1), nn.BatchNorm2d(8)) for size in (3, 8))
    return Computes(residual, stem=stem, block=block, head=nn.Linear(8, 5)).eval()


@pytest.mark.parametrize("pipeline", ["inference", "cpu-inference", "cpu-inference-int8"])
def test_an_optimized_cnn_is_mapped_over_batches(model: nn.Module, pipeline: str) -> None:
    optimized = fxopt.optimize(model, (IMAGES,), pipeline=pipeline)
    loose = pipeline.endswith("int8")
    tolerance: dict[str, Any] = {"rtol": 0.2 if loose else 1e-4, "atol": 0.1 if loose else 1e-5}
    for each in (optimized, copy.deepcopy(optimized), pickle.loads(pickle.dumps(optimized))):
        with torch.no_grad():
            expected = torch.vmap(model)(BATCHES)
            for _ in range(3):  # region programs start at the second plain call
                torch.testing.assert_close(torch.vmap(each)(BATCHES), expected, **tolerance)
                torch.testing.assert_close(each(IMAGES), model(IMAGES), **tolerance)
    by_name = torch.vmap(lambda images: optimized(x=images))(BATCHES)
    torch.testing.assert_close(by_name, torch.vmap(model)(BATCHES), **tolerance)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")  # by which torch has its own derivatives
def test_derivatives_of_an_optimized_cnn(model: nn.Module) -> None:
    optimized = fxopt.optimize(model, (IMAGES,), pipeline="cpu-inference")
    for transform in (torch.func.jacrev, torch.func.jacfwd):
        torch.testing.assert_close(transform(optimized)(IMAGES), transform(model)(IMAGES), rtol=1e-3, atol=1e-5)
    found, expected = (torch.func.jvp(each, (IMAGES,), (IMAGES,))[1] for each in (optimized, model))
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-5)
