"""The pipeline `cpu-inference` on real models: what it leaves, what it computes, what is saved."""

from __future__ import annotations

import io
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from nightly import mostly_nightly
from published_weights import efficientnet
from torch import nn
from torch.export import Dim

import fxopt
from fxopt_core import history, iter_nodes


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest difference, as a share of the largest value."""
    return float((found - expected).abs().max() / expected.abs().max())


BATCHES = ({0: Dim.AUTO},)


@pytest.fixture(scope="module", params=[False, pytest.param(True, marks=pytest.mark.nightly)], ids=["half", "whole"])
def optimized(request: pytest.FixtureRequest) -> tuple[nn.Module, Any]:
    """EfficientNet-Lite0, and what the pipeline makes of it."""
    torch.manual_seed(0)
    model, images = efficientnet(whole=request.param), torch.randn(2, 3, 224, 224)
    return model, fxopt.optimize(model, (images,), pipeline="cpu-inference", dynamic_shapes=BATCHES)


def test_nothing_but_packed_layers_is_left(optimized: tuple[nn.Module, Any]) -> None:
    """Batch norm, padding, activations and sums are gone; images are converted by no call of their own."""
    model, graph_module = optimized
    kinds = [type(module) for module in graph_module.modules()]
    blocks: Any = model._blocks
    assert kinds.count(fxopt.PackedConv2d) == 3 * len(blocks) + 1  # the first block has two, before and after it is one
    assert kinds.count(nn.Linear if fxopt.isa() is None else fxopt.PanelLinear) == 1
    assert not {nn.Conv2d, nn.BatchNorm2d, nn.ReLU6} & set(kinds)
    called = [node.name for node in iter_nodes(graph_module.graph) if node.op == "call_function"]
    assert not any("contiguous" in name for name in called)
    assert not any("pad" in name or "add" in name or "hardtanh" in name for name in called)
    assert not [refusal for record in history(graph_module) for refusal in record.refusals]


@pytest.mark.parametrize(("batch", "size"), [(1, 224), (3, 224)])
def test_every_logit_is_what_it_was(optimized: tuple[nn.Module, Any], batch: int, size: int) -> None:
    """Batches of other sizes, channels last as well."""
    model, graph_module = optimized
    images = torch.randn(batch, 3, size, size)
    with torch.inference_mode():
        expected = model(images)
        for each in (images, images.contiguous(memory_format=torch.channels_last)):
            assert relative_error(graph_module(each), expected) < 1e-5
    assert relative_error(graph_module(images).detach(), expected) < 1e-5


def test_an_archive_holds_plain_weights(optimized: tuple[nn.Module, Any], tmp_path: Path) -> None:
    """A packed model is saved and loaded like any other, and computes the same."""
    model, graph_module = optimized
    images = torch.randn(2, 3, 224, 224)
    with torch.inference_mode():
        expected = graph_module(images)
        fxopt.save(graph_module, tmp_path / "model.fxopt")
        loaded = fxopt.load(tmp_path / "model.fxopt")
        assert relative_error(loaded(images), expected) < 1e-5
        assert "run_plan" in loaded.code or "run_region" in loaded.code
        buffer = io.BytesIO()
        torch.save(graph_module, buffer)
        assert len(buffer.getvalue()) < 1.1 * sum(p.numel() * 4 for p in model.parameters())
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
        assert relative_error(again(images), expected) < 1e-5
    assert list(again.state_dict()) == list(graph_module.state_dict())


CLASSIFIERS = (
    *("resnet18", "mobilenetv2_050", "mobilenetv3_small_050", "efficientnet_b0", "regnety_002", "mnasnet_small"),
    *("densenet121", "convnext_atto", "resnext50_32x4d", "vgg11", "ghostnet_050", "tf_efficientnet_lite0"),
)


@pytest.mark.parametrize("name", mostly_nightly(CLASSIFIERS, ["mobilenetv3_small_050"]))
def test_models_of_timm_compute_what_they_did(timm: ModuleType, name: str) -> None:
    """Every convolution over images is packed, and the largest difference stays below a thousandth."""
    torch.manual_seed(0)
    model = timm.create_model(name).eval()
    images = torch.randn(2, 3, 64, 64)
    graph_module = fxopt.optimize(model, (images,), pipeline="cpu-inference", dynamic_shapes=BATCHES)
    assert not any(type(module) is nn.Conv2d for module in graph_module.modules())
    with torch.inference_mode():
        for batch in (2, 1, 3):
            images = torch.randn(batch, 3, 64, 64)
            assert relative_error(graph_module(images), model(images)) < 1e-3
