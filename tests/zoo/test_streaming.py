"""Real architectures that are made, captured and rewritten on the meta device, and then get their weights."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from architectures import BY_NAME, Architecture
from nightly import mostly_nightly
from torch import nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxopt_capture import capture
from fxopt_checkpoints import load_checkpoint, original_state_dict
from fxopt_core import CheckpointError, Transformation, compose, history, registry
from fxopt_linear import MergeLinears

transformers = pytest.importorskip("transformers")
files = pytest.importorskip("safetensors.torch")
STREAMED = ("BERT", "Llama", "Qwen2", "T5", "ViT", "ResNet", "MobileNetV2", "Gemma 2")


def on_meta(architecture: Architecture, library: ModuleType | None) -> nn.Module:
    with torch.device("meta"):
        return architecture.build(library)


def rewritten(model: nn.Module, architecture: Architecture, transformation: Transformation) -> GraphModule:
    return transformation(capture(model, kwargs=architecture.example(2, 8), dynamic_shapes=architecture.varying()))


def passes() -> Transformation:
    return compose(MergeLinears(), registry().pipeline("inference"))


def tensors(module: nn.Module) -> dict[str, torch.Tensor]:
    return {**dict(module.named_parameters(remove_duplicate=False)), **dict(module.named_buffers())}


def ties(module: nn.Module) -> list[int]:
    """Return for each tensor the place of the first one that is the same."""
    found = [id(tensor) for tensor in tensors(module).values()]
    return [found.index(each) for each in found]


def assert_same(graph_module: GraphModule, expected: GraphModule, architecture: Architecture) -> None:
    """Both have the same tensors, bit for bit, and compute the same."""
    found = tensors(graph_module)
    assert list(found) == list(tensors(expected))
    wrong = [key for key, value in tensors(expected).items() if not torch.equal(value, found[key])]
    assert wrong == []
    for batch in (1, 3):
        inputs = architecture.example(batch, 9)
        pairs = zip(pytree.tree_leaves(graph_module(**inputs)), pytree.tree_leaves(expected(**inputs)), strict=True)
        assert all(torch.equal(one, other) for one, other in pairs if isinstance(one, torch.Tensor))


@pytest.mark.parametrize("name", mostly_nightly(STREAMED, ["Qwen2", "ResNet"]))
def test_it_is_loading_and_rewriting_in_one(name: str, tmp_path: Path) -> None:
    architecture = BY_NAME[name]
    model: Any = architecture.build(transformers)
    model.save_pretrained(tmp_path, max_shard_size="40KB")
    meta = on_meta(architecture, transformers)
    graph_module = rewritten(meta, architecture, passes())
    assert sum(len(record.rewrites) for record in history(graph_module)) > 0
    assert str(load_checkpoint(graph_module, tmp_path)) == "<All keys matched successfully>"
    expected = rewritten(model, architecture, passes())
    assert_same(graph_module, expected, architecture)
    assert ties(graph_module) == ties(expected)
    saved, again = original_state_dict(expected), original_state_dict(graph_module)
    assert list(saved) == list(again) and all(torch.equal(value, again[key]) for key, value in saved.items())
    assert all(tensor.is_meta for tensor in meta.state_dict().values())


def test_converted_models_are_refused_with_what_to_do(tmp_path: Path) -> None:
    architecture = BY_NAME["Mixtral"]
    model: Any = architecture.build(transformers)
    model.save_pretrained(tmp_path)
    graph_module = rewritten(on_meta(architecture, transformers), architecture, MergeLinears())
    with pytest.raises(CheckpointError, match=r"transformers computes `.*` from other tensors when it loads"):
        load_checkpoint(graph_module, tmp_path)
    files.save_file(model.state_dict(), tmp_path / "as_it_is.safetensors")
    load_checkpoint(graph_module, tmp_path / "as_it_is.safetensors")
    inputs = architecture.example(3, 9)
    with torch.no_grad():
        torch.testing.assert_close(graph_module(**inputs).logits, model(**inputs).logits)
