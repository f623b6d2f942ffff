"""What was done travels: real models are transformed and saved here, loaded and undone elsewhere, bit for bit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from graph_picture import Picture, Task, difference, members, outputs, picture, same_bits
from published_weights import efficientnet
from torch import nn
from torch.export import Dim
from torch.fx import GraphModule

from fxopt_capture import capture
from fxopt_core import history, registry

READER = Path(__file__).parent / "graph_picture.py"
REVERSIBLE = "merge-linears,change-true-div-to-mul-by-inverse,fuse-bias-in-linear"


def llama_like() -> nn.Module:
    """A Llama of two layers, whose 4 heads of queries share 2 of keys and values, with tied embeddings."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.eval()


class Traveller:
    """A graph module that is transformed and saved here, with what it was before."""

    def __init__(self, graph_module: GraphModule, pipeline: str, inputs: dict[str, Any], path: Path) -> None:
        self.task = Task(str(path), pipeline, inputs)
        self.original: Picture = picture(graph_module)
        self.outputs = outputs(graph_module, inputs)
        passes = registry().pipeline(pipeline)
        passes(graph_module)
        self.transformed = picture(graph_module)
        self.marked = [[node.name for node in each.get_transformed_nodes(graph_module)] for each in members(passes)]
        self.history = history(graph_module).to_json()
        torch.save(graph_module, path)
        self.seen: dict[str, Any] = {}


@pytest.fixture(scope="module")
def travellers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Traveller]:
    """All models, and what one other process saw of them."""
    folder = tmp_path_factory.mktemp("travel")
    ids = torch.arange(14).view(2, 7)
    images = torch.rand(2, 3, 64, 64)
    classifier = capture(efficientnet(), images, dynamic_shapes=({0: Dim.AUTO},))
    made = {
        "Llama": Traveller(
            capture(llama_like(), kwargs={"input_ids": ids}), REVERSIBLE, {"input_ids": ids}, folder / "llama"
        ),
        "EfficientNet, folded": Traveller(
            classifier, "fuse-batch-norm2d-in-conv2d", {"inputs": images}, folder / "folded"
        ),
    }  # fmt: skip
    tasks = folder / "tasks"
    torch.save([vars(traveller.task) for traveller in made.values()], tasks)
    subprocess.run([sys.executable, str(READER), str(tasks)], check=True, timeout=300)
    for traveller, seen in zip(made.values(), torch.load(tasks.with_suffix(".seen"), weights_only=False), strict=True):
        traveller.seen = seen
    return made


NAMES = ["Llama", "EfficientNet, folded"]


@pytest.mark.parametrize("name", NAMES)
def test_it_arrives_as_it_was_sent(travellers: dict[str, Traveller], name: str) -> None:
    """Nodes, modules, tensors, records and marks; and equal passes find what they did."""
    traveller = travellers[name]
    assert difference(traveller.seen["before"], traveller.transformed) == []
    assert traveller.seen["history"] == traveller.history
    assert traveller.seen["marked"] == traveller.marked
    assert any(traveller.marked)


@pytest.mark.parametrize("how", ["after", "after reverse"])
def test_it_is_undone_bit_for_bit(travellers: dict[str, Traveller], how: str) -> None:
    """By the ledger alone, and by an equal pass after saving it once more."""
    traveller = travellers["Llama"]
    assert "refused" not in traveller.seen
    assert "reverse refused" not in traveller.seen
    assert difference(traveller.seen[how], traveller.original) == []


def test_it_computes_the_same_bits_again(travellers: dict[str, Traveller]) -> None:
    """Every output."""
    traveller = travellers["Llama"]
    assert all(same_bits(*pair) for pair in zip(traveller.seen["outputs"], traveller.outputs, strict=True))
    assert traveller.outputs


def test_a_fold_is_refused_there_and_nothing_is_changed(travellers: dict[str, Traveller]) -> None:
    """The ledger says that folding batch norms cannot be undone."""
    traveller = travellers["EfficientNet, folded"]
    assert "`fuse-batch-norm2d-in-conv2d` cannot be undone" in traveller.seen["refused"]
    assert "is not reversible" in traveller.seen["reverse refused"]
    for how in ("after", "after reverse"):
        assert difference(traveller.seen[how], traveller.transformed) == []
    seen = traveller.seen
    assert all(same_bits(*pair) for pair in zip(seen["outputs"], seen["outputs before"], strict=True))


def test_ties_and_grouped_queries_are_among_what_travels(travellers: dict[str, Traveller]) -> None:
    """The Llama has both, before and after."""
    restored = travellers["Llama"].seen["after"]
    assert restored["ties"]["lm_head.weight"] == "model.embed_tokens.weight"
    shapes = {name: tuple(value.shape) for name, value in restored["values"].items()}
    assert shapes["model.layers.0.self_attn.q_proj.weight"] == (32, 32)
    assert shapes["model.layers.0.self_attn.k_proj.weight"] == (16, 32)
