"""Archives of captured models of the field: there and back, alone with torch, undone in another process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from nightly import mostly_nightly
from torch import nn
from torch.fx import GraphModule

from fxopt_capture import capture, export, load, save
from fxopt_core import history, iter_nodes, registry, undo

PIPELINE = "merge-linears,change-true-div-to-mul-by-inverse"


def ids(rows: int, length: int) -> torch.Tensor:
    """Token ids."""
    return torch.randint(3, 60, (rows, length), generator=torch.Generator().manual_seed(rows * 100 + length))


def text(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Input of an encoder or decoder."""
    mask = torch.ones(rows, length, dtype=torch.int64)
    mask[0, -1] = 0
    return {"input_ids": ids(rows, length), "attention_mask": mask}


def pairs(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Input of an encoder with a decoder."""
    return {"input_ids": ids(rows, length), "decoder_input_ids": ids(rows, length + 2)}


def images(rows: int, length: int) -> dict[str, torch.Tensor]:
    """Input of a vision model; the size of the images is fixed."""
    return {"pixel_values": torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(rows + length))}


SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "vocab_size": 64,
}
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [2, 2], "layer_type": "basic", "num_channels": 3}
Inputs = Callable[[int, int], dict[str, torch.Tensor]]
MODELS: dict[str, tuple[str, dict[str, Any], Inputs]] = {
    "Bert": ("BertModel", SMALL, text),
    "Llama": ("LlamaForCausalLM", {**SMALL, "num_key_value_heads": 2}, text),
    "T5": ("T5ForConditionalGeneration", T5, pairs),
    "ViT": ("ViTModel", {**SMALL, "image_size": 32, "patch_size": 8}, images),
    "ResNet": ("ResNetModel", RESNET, images),
}
SIZES = ((2, 6), (3, 9), (1, 4), (5, 17))


def made(name: str) -> tuple[nn.Module, Inputs]:
    """Return a small model with random weights."""
    transformers = pytest.importorskip("transformers", minversion="5")
    cls, settings, inputs = MODELS[name]
    torch.manual_seed(0)
    model: nn.Module = getattr(transformers, cls)(getattr(transformers, f"{name}Config")(**settings)).eval()
    with torch.no_grad():
        for key, buffer in model.named_buffers():
            if key.endswith(("running_mean", "running_var")):
                buffer.uniform_(0.5, 1.5)
    return model, inputs


def captured(model: nn.Module, inputs: dict[str, torch.Tensor]) -> GraphModule:
    """Capture a model, without a cache where it makes one."""
    return capture(model, (), {**inputs, **baked(model)})


def baked(model: nn.Module) -> dict[str, Any]:
    """Arguments that are part of the graph, and that calls of it repeat."""
    return {"use_cache": False} if type(model).__name__.startswith(("Llama", "T5")) else {}


def tensors(output: Any) -> list[torch.Tensor]:
    """All tensors of an output."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def equal(one: Any, other: Any) -> bool:
    """Whether two outputs are of one type and hold the same numbers."""
    found, expected = tensors(one), tensors(other)
    return type(one) is type(other) and len(found) == len(expected) and all(map(torch.equal, found, expected))


def layout(graph_module: GraphModule) -> list[tuple[object, ...]]:
    """All that a graph consists of, node by node."""
    nodes = iter_nodes(graph_module.graph)
    return [(node.op, node.name, str(node.target), str(node.args), str(node.kwargs)) for node in nodes]


@pytest.mark.parametrize("name", mostly_nightly(MODELS, ["Bert", "ResNet"]))
def test_an_archive_gives_back_what_was_saved(name: str, tmp_path: Path) -> None:
    """The same nodes, keys, history and numbers at four sizes; torch alone runs it; undo gives the original."""
    model, inputs = made(name)
    original = captured(model, inputs(2, 6))
    nodes, keys = layout(original), list(original.state_dict())
    pipeline = f"{PIPELINE},fuse-batch-norm2d-in-conv2d" if name == "ResNet" else PIPELINE
    transformed = registry().pipeline(pipeline)(original)
    path = tmp_path / "model.fxopt"
    save(transformed, path)
    loaded, module = load(path), export(transformed).module()
    assert layout(loaded) == layout(transformed)
    assert list(loaded.state_dict()) == list(transformed.state_dict())
    assert set(module.state_dict()) == set(transformed.state_dict())
    assert history(loaded) == history(transformed)
    positional = ["pixel_values"] if name == "ResNet" else []
    with torch.no_grad():
        for size in SIZES:
            call = inputs(*size)
            expected = transformed(**call, **baked(model))
            assert equal(loaded(**call, **baked(model)), expected), size
            args = [call.pop(key) for key in positional]
            assert equal(module(*args, **call), expected), size
    if name != "ResNet":
        assert layout(undo(loaded)) == nodes
        assert list(loaded.state_dict()) == keys
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())


@pytest.mark.nightly
def test_bfloat16(tmp_path: Path) -> None:
    """Llama in half precision, merged and undone."""
    model, inputs = made("Llama")
    transformed = registry().pipeline(PIPELINE)(captured(model.bfloat16(), inputs(2, 6)))
    save(transformed, tmp_path / "model.fxopt")
    loaded = load(tmp_path / "model.fxopt")
    with torch.no_grad():
        call = {**inputs(3, 9), **baked(model)}
        assert equal(loaded(**call), transformed(**call))
    restored = undo(loaded).state_dict()
    assert all(torch.equal(value, model.state_dict()[key]) for key, value in restored.items())


def test_another_process_undoes_and_loads_the_checkpoint(tmp_path: Path) -> None:
    """With nothing but the archive: history, undo, and the original keys."""
    model, inputs = made("Bert")
    transformed = registry().pipeline(PIPELINE)(captured(model, inputs(2, 6)))
    save(transformed, tmp_path / "model.fxopt")
    call = inputs(3, 9)
    with torch.no_grad():
        torch.save({"call": call, "state": transformed(**call).last_hidden_state}, tmp_path / "call.pt")
    torch.save(model.state_dict(), tmp_path / "state.pt")
    script = """
        import torch
        from fxopt_capture.archive.files import load
        from fxopt_core import history, undo
        from fxopt_checkpoints.load import original_state_dict
        loaded, told, state = load("model.fxopt"), torch.load("call.pt"), torch.load("state.pt")
        with torch.no_grad():
            found = loaded(**told["call"])
        assert type(found).__name__ == "BaseModelOutputWithPoolingAndCrossAttentions"
        assert torch.equal(found.last_hidden_state, told["state"])
        assert [record.state for record in history(loaded)] == ["applied", "applied"]
        original = original_state_dict(loaded)
        assert all(torch.equal(value, state[key]) for key, value in original.items())
        undone = undo(loaded).state_dict()
        assert list(undone) == [key for key in state if key in undone]
        assert all(torch.equal(value, state[key]) for key, value in undone.items())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
