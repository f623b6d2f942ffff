"""`verify` on what models of transformers return and are given: model outputs, with caches inside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from cache_names import CACHE
from torch import Tensor, nn

from fxopt_tools import Inputs, verify

transformers = pytest.importorskip("transformers")

TOKENS = torch.tensor([[1, 5, 7, 2], [3, 3, 9, 0]])


@pytest.fixture(scope="module")
def llama() -> Any:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        config = transformers.LlamaConfig(
            vocab_size=16, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
            num_key_value_heads=2,
        )  # fmt: skip
        return transformers.LlamaForCausalLM(config).eval()


def altered(model: nn.Module, name: str) -> nn.Module:
    """Return a copy in which one element of a parameter is another."""
    twin = copy.deepcopy(model)
    with torch.no_grad():
        twin.get_parameter(name).view(-1)[0] += 1
    return twin


def test_a_cache_in_the_output_is_compared_layer_by_layer(llama: Any) -> None:
    report = verify(llama, copy.deepcopy(llama), {"input_ids": TOKENS, "use_cache": True})
    assert report, str(report)
    paths = [output.path for output in report.outputs if output.shape is not None]
    assert "output.logits" in paths and f"output.{CACHE}.layers[1].values" in paths
    report = verify(llama, altered(llama, "model.layers.1.self_attn.v_proj.weight"), Inputs(TOKENS, use_cache=True))
    assert {"output.logits", f"output.{CACHE}.layers[1].values"} <= {each.path for each in report.failures}
    assert f"output.{CACHE}.layers[0].keys" not in {each.path for each in report.failures}


def test_a_cache_that_is_given_is_copied_and_what_it_becomes_is_compared(llama: Any) -> None:
    cache = transformers.DynamicCache()
    llama(TOKENS, **{CACHE: cache})
    before = [layer.keys.clone() for layer in cache.layers]

    class Logits(nn.Module):
        """Returns no cache, so that only the argument shows what becomes of it."""

        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model = model

        def forward(self, tokens: Tensor, cache: Any) -> Any:
            return self.model(tokens, **{CACHE: cache}).logits[:, -1]

    inputs = (TOKENS[:, :1], cache)
    report = verify(Logits(llama), Logits(copy.deepcopy(llama)), inputs)
    assert report, str(report)
    assert any(output.path == "args[1].layers[0].keys after the call" for output in report.outputs)
    wrong = altered(llama, "model.layers.1.self_attn.k_proj.weight")
    report = verify(Logits(llama), Logits(wrong), inputs)
    assert "args[1].layers[1].keys after the call" in {output.path for output in report.failures}
    assert [layer.keys.shape for layer in cache.layers] == [keys.shape for keys in before]
    assert all(torch.equal(layer.keys, keys) for layer, keys in zip(cache.layers, before, strict=True))


def test_other_classes_of_outputs_differ(llama: Any) -> None:
    class AsTuple(nn.Module):
        def forward(self, tokens: Tensor) -> Any:
            return llama(tokens).to_tuple()

    report = verify(llama, AsTuple(), TOKENS)
    assert not report and "CausalLMOutputWithPast" in str(report)
