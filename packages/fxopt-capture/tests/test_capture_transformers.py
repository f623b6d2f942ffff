"""Hugging Face models, tiny and with random weights: equal outputs at other sizes, the model's keys, and its layers."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest
import torch
from archive_models import layout
from cache_names import CACHE
from test_weightless import conditions
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxopt_capture import capture, symbolic_trace
from fxopt_core.errors import CaptureError

SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}
PATCHES = {**SMALL, "image_size": 32, "patch_size": 8}
SEQ2SEQ = {"d_model": 32, "vocab_size": 99, "decoder_start_token_id": 0}

# class: (options of its configuration, inputs, layers that the graph calls)
MODELS: dict[str, tuple[dict[str, Any], list[str], dict[str, int]]] = {
    "BertModel": (SMALL, ["input_ids", "attention_mask"], {"Linear": 7, "LayerNorm": 3, "Embedding": 3}),
    "LlamaForCausalLM": (
        {**SMALL, "num_key_value_heads": 2},
        ["input_ids", "attention_mask"],
        {"Linear": 8, "Embedding": 1},
    ),
    "GPT2LMHeadModel": (
        {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2},
        ["input_ids", "attention_mask"],
        {"Linear": 1, "LayerNorm": 3, "Embedding": 2},
    ),
    "T5ForConditionalGeneration": (
        {**SEQ2SEQ, "d_kv": 8, "num_layers": 1, "num_heads": 4, "d_ff": 64},
        ["input_ids", "attention_mask", "decoder_input_ids"],
        {"Linear": 17, "Embedding": 4},
    ),
    "ViTModel": (PATCHES, ["pixel_values"], {"Conv2d": 1, "Linear": 7, "LayerNorm": 3}),
    "ResNetModel": (
        {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 2], "layer_type": "basic"},
        ["pixel_values"],
        {"Conv2d": 8, "BatchNorm2d": 8},
    ),
    "CLIPModel": (
        {"text_config": {**SMALL, "eos_token_id": 2}, "vision_config": PATCHES, "projection_dim": 16},
        ["input_ids", "pixel_values", "attention_mask"],
        {"Conv2d": 1, "Linear": 14, "LayerNorm": 7, "Embedding": 3},
    ),
}


def build(transformers: ModuleType, name: str, **changes: object) -> Any:
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    return cls(cls.config_class(**{**MODELS[name][0], **changes})).eval()


def example(names: Sequence[str], batch: int, length: int, image: int = 32) -> dict[str, Tensor]:
    made = {
        "input_ids": torch.randint(3, 99, (batch, length)),
        "decoder_input_ids": torch.randint(3, 99, (batch, max(1, length - 2))),
        "attention_mask": torch.ones(batch, length, dtype=torch.int64),
        "pixel_values": torch.randn(batch, 3, image, image),
    }
    made["attention_mask"][0, : length // 3] = 0
    return {name: made[name] for name in names}


def layers(graph_module: GraphModule) -> Counter[str]:
    targets = [str(node.target) for node in graph_module.graph.find_nodes(op="call_module")]
    return Counter(type(graph_module.get_submodule(target)).__name__ for target in targets if target != "_guards_fn")


def check_same(model: nn.Module, captured: GraphModule, inputs: dict[str, Tensor]) -> None:
    with torch.no_grad():
        with_cache = "input_ids" in inputs and type(model).__name__ != "CLIPModel"
        expected = model(**inputs, **({"use_cache": False} if with_cache else {}))
        found = captured(**inputs)
    assert type(found) is type(expected)
    for left, right in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-6)


# Other tests have them, or what is like them.
NIGHTLY = ("BertModel", "GPT2LMHeadModel", "ViTModel", "Wav2Vec2Model")


def by_day(names: Iterable[str], *others: str) -> list[Any]:
    return [pytest.param(name, marks=pytest.mark.nightly if name in (*NIGHTLY, *others) else ()) for name in names]


@dataclass(frozen=True)
class Traced:
    """A model, its trace, and what there was of the model before."""

    name: str
    model: Any
    graph_module: GraphModule
    config: dict[str, Any]
    state: dict[int, dict[str, Any]]


@pytest.fixture(scope="module")
def found(request: Any, transformers: ModuleType) -> Traced:
    model = build(transformers, request.param)
    config = copy.deepcopy(model.config.to_dict())
    state = {id(module): dict(vars(module)) for module in model.modules()}
    return Traced(request.param, model, symbolic_trace(model), config, state)


@pytest.mark.parametrize("found", by_day(MODELS), indirect=True)
def test_symbolic_trace(found: Traced) -> None:
    name, model, traced = found.name, found.model, found.graph_module
    _, inputs, expected = MODELS[name]
    assert sorted(node.target for node in traced.graph.find_nodes(op="placeholder")) == sorted(inputs)
    assert layers(traced) == expected
    assert list(traced.state_dict()) == list(model.state_dict())
    assert [id(value) for value in traced.parameters()] == [id(value) for value in model.parameters()]
    assert model.config.to_dict() == found.config
    assert all(vars(module) == found.state[id(module)] for module in model.modules())
    for batch, length in ((2, 8), (1, 8), (3, 11), (1, 5)):
        check_same(model, traced, example(inputs, batch, length, image=224 if name == "ResNetModel" else 32))


# Without values, torch cannot look whether a model takes images of other sizes; those of ResNet vary otherwise.
HOLLOW = [name for name in MODELS if name != "ResNetModel"]


@pytest.mark.parametrize("found", by_day(HOLLOW, "T5ForConditionalGeneration", "CLIPModel"), indirect=True)
def test_models_on_meta(found: Traced) -> None:
    """The graph is that of the model with weights, and takes its weights."""
    model, expected = found.model, found.graph_module
    with torch.device("meta"):
        hollow = type(model)(copy.deepcopy(model.config)).eval()
    captured = symbolic_trace(hollow)
    assert layout(captured) == layout(expected)
    assert {*conditions(expected)} <= {*conditions(captured)}
    saved, buffers = expected.state_dict(), dict(captured.named_buffers())
    computed = {key: buffer for key, buffer in expected.named_buffers() if key not in saved}
    assert all(torch.equal(buffers[key], buffer) for key, buffer in computed.items())
    assert all(tensor.is_meta for tensor in (*hollow.parameters(), *hollow.buffers()))
    captured.load_state_dict(saved, assign=True)
    assert not any(tensor.is_meta for tensor in (*captured.parameters(), *captured.buffers()))


def test_buffers_that_a_model_does_not_compute_stay_empty(transformers: ModuleType) -> None:
    options, inputs, _ = MODELS["LlamaForCausalLM"]
    cls = transformers.LlamaForCausalLM

    class Custom(cls):  # type: ignore[misc,valid-type]  # transformers is not known to mypy
        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.register_buffer("shift", torch.zeros(1), persistent=False)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            found = super().forward(input_ids, attention_mask, use_cache=False)
            found.logits = found.logits + self.shift
            return found

    with torch.device("meta"):
        model = Custom(cls.config_class(**options)).eval()
    captured = symbolic_trace(model, inputs)
    hollow = [key for key, buffer in captured.named_buffers() if buffer.is_meta]
    assert hollow == ["shift"]


def test_input_names_choose_the_inputs(transformers: ModuleType) -> None:
    bert = build(transformers, "BertModel")
    traced = symbolic_trace(bert, ["input_ids", "token_type_ids", "attention_mask"])
    inputs = {**example(["input_ids", "attention_mask"], 3, 6), "token_type_ids": torch.ones(3, 6, dtype=torch.int64)}
    check_same(bert, traced, inputs)


def test_a_name_whose_shape_is_not_known(transformers: ModuleType) -> None:
    with pytest.raises(CaptureError, match=f"'{CACHE}' of LlamaForCausalLM does not follow"):
        symbolic_trace(build(transformers, "LlamaForCausalLM"), ["input_ids", CACHE])


def test_packed_sequences_in_a_batch_of_one_are_not_computed_as_one(transformers: ModuleType) -> None:
    model = build(transformers, "LlamaForCausalLM")
    ids, positions = torch.randint(3, 99, (1, 8)), torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3]])
    example = {"input_ids": ids.repeat(2, 1), "position_ids": torch.arange(8).expand(2, 8).clone()}
    captured = capture(model, kwargs={**example, "use_cache": False})
    with torch.no_grad():
        expected = model(input_ids=ids, position_ids=positions, use_cache=False).logits
        try:
            found = captured(input_ids=ids, position_ids=positions, use_cache=False).logits
        except CaptureError:
            return
    torch.testing.assert_close(found, expected)


# class: (options of its configuration, its input, the input's sizes at capture, other sizes)
_WAVES = {**SMALL, "conv_dim": [8] * 7, "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2}
_CODES = {"hidden_size": 16, "downsampling_ratios": [4], "upsampling_ratios": [4], "encoder_hidden_size": 8}
SOUNDS: dict[str, tuple[dict[str, Any], str, tuple[int, ...], tuple[int, ...]]] = {
    "Wav2Vec2Model": (_WAVES, "input_values", (2, 4000), (3, 6123)),
    "Wav2Vec2BertModel": ({**SMALL, "feature_projection_input_dim": 16}, "input_features", (2, 20, 16), (3, 33, 16)),
    "DacModel": ({**_CODES, "decoder_hidden_size": 16, "n_codebooks": 1}, "input_values", (2, 1, 160), (1, 1, 320)),
}


@pytest.mark.parametrize("name", by_day(SOUNDS))
def test_sounds_of_other_lengths(transformers: ModuleType, name: str) -> None:
    options, key, sizes, others = SOUNDS[name]
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model = cls(cls.config_class(**options)).eval()
    captured = capture(model, kwargs={key: torch.randn(sizes)})
    inputs = {key: torch.randn(others)}
    with torch.no_grad():
        found, expected = captured(**inputs), model(**inputs)
    for left, right in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


class Wrapped(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_values: Tensor, scores: Tensor) -> tuple[Tensor, Tensor]:
        return self.model(input_values).last_hidden_state, scores.softmax(-1)


def test_sounds_of_a_model_in_another_module(transformers: ModuleType) -> None:
    """Both lengths vary: that of the sound, and that of an input whose name says nothing."""
    torch.manual_seed(0)
    few = {**_WAVES, "conv_dim": [8] * 3, "conv_kernel": [10, 3, 2], "conv_stride": [5, 2, 2]}
    model = Wrapped(transformers.HubertModel(transformers.HubertConfig(**few))).eval()
    captured = capture(model, (torch.randn(1, 400), torch.randn(1, 5)))
    inputs = torch.randn(3, 613), torch.randn(3, 7)
    with torch.no_grad():
        torch.testing.assert_close(captured(*inputs), model(*inputs), rtol=1e-5, atol=1e-5)
