"""Hugging Face models whose graphs were wrong once agree with them, and all of each model stays as it was."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxopt_capture import capture
from fxopt_core.errors import CaptureError

TEXT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}
IDS = torch.arange(3, 15).view(2, 6)
ONES = torch.ones_like(IDS)


def everything(value: object, seen: dict[int, object]) -> object:
    """Return all that can be reached from a value, as nested lists: contents of containers, attributes, tensors."""
    if id(value) in seen:
        return "again"
    seen[id(value)] = value
    if isinstance(value, Tensor):
        return [id(value), value.requires_grad, value.detach().clone(), value._version]
    if isinstance(value, dict):
        return [[key, everything(each, seen)] for key, each in value.items()]
    if isinstance(value, list | tuple | set):
        return [type(value), [everything(each, seen) for each in value]]
    if isinstance(value, type) or (callable(value) and not isinstance(value, nn.Module)):
        return id(value)
    if hasattr(value, "__dict__"):
        return [type(value), id(value), everything(vars(value), seen)]
    return value


def state(model: nn.Module) -> list[Any]:
    return pytree.tree_leaves(everything(model, {}))


def check_untouched(model: nn.Module, before: list[Any]) -> None:
    after = state(model)
    assert len(after) == len(before)
    for left, right in zip(after, before, strict=True):
        assert torch.equal(left, right) if isinstance(left, Tensor) else left == right


def check_right(model: nn.Module, captured: GraphModule, inputs: Mapping[str, object]) -> None:
    with torch.no_grad():
        expected, found = model(**copy.deepcopy(inputs)), captured(**inputs)
    assert type(found) is type(expected)
    assert list(found) == list(expected)
    for left, right in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)


def mixture(transformers: ModuleType) -> nn.Module:
    """Return a composite model with experts, whose configurations write their settings through."""
    text = {**TEXT, "num_key_value_heads": 2, "num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2}
    vision = {"depth": 1, "hidden_size": 32, "num_heads": 4, "intermediate_size": 64, "out_hidden_size": 32}
    config = transformers.Qwen3VLMoeConfig(
        text_config={**text, "head_dim": 8}, vision_config={**vision, "deepstack_visual_indexes": [0]}
    )
    torch.manual_seed(0)
    model: nn.Module = transformers.Qwen3VLMoeModel(config).eval()
    return model


def test_a_composite_model_is_left_as_it_was_with_all_its_configurations(transformers: ModuleType) -> None:
    model = mixture(transformers)
    model.get_submodule("language_model").register_forward_hook(hook := lambda module, args, output: None)
    next(model.parameters()).requires_grad_(False)
    before = state(model)
    assert "batched_mm" not in before
    captured = capture(model, kwargs={"input_ids": IDS, "attention_mask": ONES})
    check_untouched(model, before)
    assert list(model.get_submodule("language_model")._forward_hooks.values()) == [hook]
    check_right(model, captured, {"input_ids": IDS[:1], "attention_mask": ONES[:1]})


def test_a_model_that_cannot_be_captured_is_left_as_it_was(transformers: ModuleType) -> None:
    model = mixture(transformers)

    def branch(module: Any, args: object, kwargs: Mapping[str, Any]) -> None:
        module.config.num_hidden_layers += 1
        module.config.rope_parameters["seen"] = [1]
        if kwargs["inputs_embeds"].sum() > 0:
            raise ValueError("unreachable in a graph")

    model.get_submodule("language_model").register_forward_pre_hook(branch, with_kwargs=True)
    before = state(model)
    with pytest.raises(CaptureError, match="cannot be captured"):
        capture(model, kwargs={"input_ids": IDS, "attention_mask": ONES})
    check_untouched(model, before)


@pytest.fixture(scope="module")
def grids(transformers: ModuleType) -> tuple[nn.Module, GraphModule]:
    """Return an encoder of images with combined projections and norms of queries and keys, and its graph."""
    config = transformers.GlmOcrConfig().vision_config.__class__(
        depth=1, hidden_size=32, num_heads=4, intermediate_size=64, patch_size=4, out_hidden_size=32
    )
    torch.manual_seed(0)
    model = transformers.GlmOcrVisionModel(config).eval()
    for name, parameter in model.named_parameters():
        if "_norm" in name:
            nn.init.uniform_(parameter, 0.5, 2)
    return model, capture(model, kwargs=images([[1, 4, 4], [1, 4, 4]]))


def images(grid: list[list[int]]) -> dict[str, Tensor]:
    sizes = torch.tensor(grid)
    return {"hidden_states": torch.randn(int(sizes.prod(-1).sum()), 96), "grid_thw": sizes}


@pytest.mark.parametrize("grid", [[[1, 4, 4], [1, 4, 4]], [[1, 2, 8], [1, 4, 4]], [[1, 8, 8], [1, 8, 8]]])
def test_attention_with_combined_projections_norms_queries_and_keys(
    grids: tuple[nn.Module, GraphModule], grid: list[list[int]]
) -> None:
    check_right(*grids, images(grid))


def test_images_of_other_sizes_than_each_other_are_refused_in_words(grids: tuple[nn.Module, GraphModule]) -> None:
    with pytest.raises(CaptureError, match="captured GlmOcrVisionModel is not valid for the values of these inputs"):
        grids[1](**images([[1, 4, 6], [1, 4, 2]]))


def test_masks_of_several_conditions(transformers: ModuleType) -> None:
    text = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "layer_types": ["full_attention"]}
    vision = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=2)
    torch.manual_seed(0)
    model = transformers.Gemma3Model(config).eval()
    kinds = torch.tensor([[0, 0, 1, 1, 0, 0]] * 2)
    padded = ONES.clone()
    padded[0, :2] = 0
    example = {"input_ids": IDS, "attention_mask": padded, "token_type_ids": kinds, "use_cache": False}
    captured = capture(model, kwargs=example)
    assert not any("vmap" in str(node.target) or "flat_apply" in str(node.target) for node in captured.graph.nodes)
    check_right(model, captured, example)
    other = {"input_ids": torch.cat([IDS, IDS + 1]), "attention_mask": ONES.repeat(2, 1), "use_cache": False}
    check_right(model, captured, {**other, "token_type_ids": torch.cat([kinds, kinds.flip(1)])})


def test_attention_that_cannot_be_exported_is_captured_in_single_operators(
    transformers: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    def branching_attention(module: Any, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        assert query.sum() == query.sum()
        return transformers.integrations.sdpa_attention.sdpa_attention_forward(module, query, *args, **kwargs)

    functions = transformers.AttentionInterface
    functions.register("branching", branching_attention)
    transformers.AttentionMaskInterface.register("branching", transformers.masking_utils.sdpa_mask)
    try:
        torch.manual_seed(0)
        model = transformers.BertModel(transformers.BertConfig(**TEXT, attn_implementation="branching")).eval()
        before = state(model)
        with caplog.at_level("WARNING", "fxopt_capture"):
            captured = capture(model, kwargs={"input_ids": IDS, "attention_mask": ONES})
        check_untouched(model, before)
        check_right(model, captured, {"input_ids": IDS[:1], "attention_mask": ONES[:1]})
    finally:
        functions._global_mapping.pop("branching")
        transformers.AttentionMaskInterface._global_mapping.pop("branching")
    assert "attention as single operators (attn_implementation='eager'), as the model cannot be captured" in caplog.text
    assert "scaled_dot_product_attention" not in captured.code


def test_a_cache_that_the_model_does_not_make_by_itself_is_not_in_the_graph(transformers: ModuleType) -> None:
    config = transformers.GPT2Config(n_embd=32, n_layer=1, n_head=4, vocab_size=99)
    model = transformers.GPT2LMHeadModel(config).eval()
    forward = type(model).forward

    class Reluctant(type(model)):  # type: ignore[misc]  # a class that is known at run time
        def forward(self, input_ids: Tensor, use_cache: bool | None = None) -> Any:
            return forward(self, input_ids, use_cache=bool(use_cache))

    model.__class__ = Reluctant
    captured = capture(model, (IDS,))
    assert list(captured(IDS)) == list(model(IDS)) == ["logits"]


def test_routers_that_convert_their_layers_are_refused(transformers: ModuleType) -> None:
    small = {"d_model": 16, "d_kv": 4, "d_ff": 16, "num_heads": 2, "num_layers": 1, "num_sparse_encoder_layers": 1}
    config = transformers.SwitchTransformersConfig(**small, vocab_size=99, num_experts=4, expert_capacity=64)
    layers = transformers.SwitchTransformersEncoderModel(config).eval().encoder.block[0].layer
    model = nn.Sequential(layers[-1])
    before = state(model)
    with pytest.raises(CaptureError, match=r"Sequential cannot be captured: .*torch\.compile\("):
        capture(model, torch.randn(2, 6, 16))
    check_untouched(model, before)
