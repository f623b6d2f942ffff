"""Archives of captured models of the field: there and back, alone with torch, undone in another process."""

from __future__ import annotations

import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import BY_NAME
from nightly import mostly_nightly
from torch import nn
from torch.fx import GraphModule

from fxopt_capture import capture, export, load, save
from fxopt_core import faithful_copy, history, iter_nodes, registry, undo

PIPELINE = "merge-linears,change-true-div-to-mul-by-inverse"
SIZES = ((2, 6), (3, 9), (1, 4), (5, 17))


def made(name: str) -> tuple[nn.Module, GraphModule]:
    """Return a small model with random weights, and its graph."""
    model = BY_NAME[name].build(pytest.importorskip("transformers", minversion="5"))
    return model, capture(model, kwargs=BY_NAME[name].example(2, 6), dynamic_shapes=BY_NAME[name].varying())


@pytest.fixture(scope="module")
def bert() -> tuple[nn.Module, GraphModule]:
    """Captured once, and not changed."""
    return made("BERT")


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


@pytest.mark.parametrize("name", mostly_nightly(["BERT", "Llama", "T5", "ViT", "ResNet"], ["BERT", "ResNet"]))
def test_an_archive_gives_back_what_was_saved(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """The same nodes, keys, history and numbers at four sizes; torch alone runs it; undo gives the original."""
    model, original = request.getfixturevalue("bert") if name == "BERT" else made(name)
    inputs, nodes, keys = BY_NAME[name].example, layout(original), list(original.state_dict())
    pipeline = f"{PIPELINE},fuse-batch-norm2d-in-conv2d" if name == "ResNet" else PIPELINE
    transformed = registry().pipeline(pipeline)(faithful_copy(original))
    path = tmp_path / "model.fxopt"
    save(transformed, path)
    loaded, module = load(path), export(transformed).module()
    assert layout(loaded) == layout(transformed)
    assert list(loaded.state_dict()) == list(transformed.state_dict())
    assert set(module.state_dict()) == set(transformed.state_dict())
    assert history(loaded) == history(transformed)
    with torch.no_grad():
        for size in SIZES:
            call = inputs(*size)
            expected = transformed(**call)
            assert equal(loaded(**call), expected), size
            assert equal(module(**call), expected), size
    if name != "ResNet":
        assert layout(undo(loaded)) == nodes
        assert list(loaded.state_dict()) == keys
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())


def test_another_process_undoes_and_loads_the_checkpoint(bert: tuple[nn.Module, GraphModule], tmp_path: Path) -> None:
    """With nothing but the archive: history, undo, and the original keys."""
    model, original = bert
    transformed = registry().pipeline(PIPELINE)(faithful_copy(original))
    save(transformed, tmp_path / "model.fxopt")
    call = BY_NAME["BERT"].example(3, 9)
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
