"""The batch norms of DETR, which it computes from buffers in every call, are folded as others are."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fxopt
from fxopt_checkpoints.load import load_original_state_dict, original_state_dict
from fxopt_norm import FuseBatchNorm2dInConv2d
from fxopt_testing.rewrites import refusals

pytest.importorskip("transformers")
IMAGES = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


def detr(seed: int) -> nn.Module:
    """Return a small DETR in which no batch norm is the identity."""
    from transformers import DetrConfig, DetrModel, ResNetConfig
    from transformers.models.detr.modeling_detr import DetrFrozenBatchNorm2d

    torch.manual_seed(seed)
    backbone = ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", out_features=["stage2"]
    )
    sizes = {"d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "num_queries": 3}
    sizes |= {f"{part}_{size}": 2 for part in ("encoder", "decoder") for size in ("attention_heads", "ffn_dim")}
    config = DetrConfig(use_timm_backbone=False, backbone=None, backbone_config=backbone, **sizes)
    model: nn.Module = DetrModel(config).eval()
    for norm in model.modules():
        if isinstance(norm, DetrFrozenBatchNorm2d):
            for buffer, low in zip(norm.buffers(), (0.5, -1.0, -1.0, 0.5), strict=True):
                buffer.uniform_(low, 2.0)
    return model


def test_detr() -> None:
    model, other = detr(0), detr(1)
    graph_module = fxopt.capture(model, (IMAGES,), dynamic_shapes={})
    calls = len(graph_module.graph.find_nodes(op="call_function", target=torch.ops.aten.rsqrt.default))
    before = len(graph_module.graph.nodes)
    folded = FuseBatchNorm2dInConv2d()(graph_module)
    assert calls == 6 and before - len(folded.graph.nodes) == 6 * (4 + 4 + 7)  # buffers, their views, arithmetic
    assert not refusals(folded) and not [key for key in folded.state_dict() if "normalization" in key]
    torch.testing.assert_close(folded(IMAGES)[0], model(IMAGES)[0], rtol=1e-4, atol=1e-4)

    load_original_state_dict(folded, other.state_dict())
    torch.testing.assert_close(folded(IMAGES)[0], other(IMAGES)[0], rtol=1e-4, atol=1e-4)
    model.load_state_dict(original_state_dict(folded))
    torch.testing.assert_close(model(IMAGES)[0], other(IMAGES)[0], rtol=1e-4, atol=1e-4)
