"""`FuseScaledDotProductAttention` on eager attention that others wrote: transformers and timm."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from nightly import mostly_nightly
from torch import Tensor, nn

from fxopt_capture import capture
from fxopt_core import history, iter_nodes, undo
from fxopt_simplify import FuseScaledDotProductAttention

transformers: Any = pytest.importorskip("transformers")
SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
MODELS: dict[str, dict[str, Any]] = {
    "BertModel": SIZES,
    "LlamaModel": SIZES | {"num_key_value_heads": 2, "use_cache": False},
    "T5EncoderModel": T5,
    "ViTModel": SIZES | {"image_size": 16, "patch_size": 8},
}


def tokens(rows: int, length: int) -> dict[str, Tensor]:
    """Return sentences of unequal length."""
    mask = torch.ones(rows, length, dtype=torch.long)
    mask[-1, length // 2 :] = 0
    return {"input_ids": torch.randint(0, 60, (rows, length)), "attention_mask": mask}


def check(model: nn.Module, *inputs: dict[str, Tensor]) -> None:
    """Fuse the attentions of two layers, compare at each of these inputs, and undo."""
    graph_module = capture(model, (), inputs[0])
    before = [node.name for node in iter_nodes(graph_module.graph)]
    FuseScaledDotProductAttention()(graph_module, expect=2, strict=True)
    with torch.no_grad():
        for given in inputs:
            found, expected = (torch.utils._pytree.tree_leaves(each(**given)) for each in (graph_module, model))
            for one, other in zip(found, expected, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-5)
    assert history(graph_module)[-1].refusals == ()
    assert not [node for node in iter_nodes(graph_module.graph) if "softmax" in node.name or node.name == "clone"]
    undo(graph_module)
    assert [node.name for node in iter_nodes(graph_module.graph)] == before


@pytest.mark.parametrize("name", mostly_nightly(MODELS, ["LlamaModel", "T5EncoderModel"]))
def test_transformers(name: str) -> None:
    torch.manual_seed(0)
    cls: Any = getattr(transformers, name)
    words = {} if name == "ViTModel" else {"vocab_size": 60}
    configuration = cls.config_class(**MODELS[name], **words, attn_implementation="eager")
    images = ({"pixel_values": torch.randn(rows, 3, 16, 16)} for rows in (2, 3))
    inputs = images if name == "ViTModel" else (tokens(2, 7), tokens(3, 5))
    check(cls(configuration).eval(), *inputs)


@pytest.mark.nightly
def test_timm(timm: ModuleType) -> None:
    torch.manual_seed(0)
    model: nn.Module = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=5).eval()
    for module in model.modules():
        if hasattr(module, "fused_attn"):
            module.fused_attn = False  # type: ignore[assignment]  # timm's flag is no tensor
    check(model, *({"x": torch.randn(rows, 3, 32, 32)} for rows in (2, 3)))
