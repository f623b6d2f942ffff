"""GPT-2 and its relatives, whose linear layers store their weights as (in, out)."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fxopt_capture import capture
from fxopt_core import compose, history, undo
from fxopt_linear import MergeLinears
from fxopt_simplify import EliminateCommonSubexpressions

transformers: Any = pytest.importorskip("transformers")

SIZES = {"n_layer": 2, "n_embd": 16, "n_head": 2, "n_positions": 32, "vocab_size": 50, "bos_token_id": 0}


def inputs(batch: int, length: int, encoded: int) -> dict[str, Any]:
    """Tokens, and what an encoder has made of something else."""
    generator = torch.Generator().manual_seed(batch)
    return {
        "input_ids": torch.randint(0, 50, (batch, length), generator=generator),
        "encoder_hidden_states": torch.randn(batch, encoded, 16, generator=generator),
        "use_cache": False,
    }


@pytest.fixture(scope="module")
def decoder() -> Any:
    """GPT-2 as the decoder of an image captioner, say: it attends to an encoder's output in each layer."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(**SIZES, eos_token_id=0, add_cross_attention=True)
    model = transformers.GPT2Model(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def test_keys_and_values_of_all_layers_become_one_product(decoder: Any) -> None:
    """They read the same output of the encoder; undo gives the checkpoint back, and the graph."""
    graph_module = capture(decoder, kwargs=inputs(2, 7, 5))
    code = graph_module.code
    # Each layer reads the output through a view of its own; the first pass leaves one of these.
    compose(EliminateCommonSubexpressions(), MergeLinears())(graph_module)
    assert history(graph_module)[-1].rewrites[0].site == "h: 0_crossattention_c_attn + 1_crossattention_c_attn"
    merged = graph_module.get_submodule("h.0_crossattention_c_attn_1_crossattention_c_attn_merged")
    assert repr(merged) == "Linear(in_features=16, out_features=64, bias=True)"
    for sizes in ((2, 7, 5), (3, 9, 4)):
        with torch.no_grad():
            found, expected = graph_module(**inputs(*sizes)), decoder(**inputs(*sizes))
        torch.testing.assert_close(found.last_hidden_state, expected.last_hidden_state, rtol=1e-4, atol=1e-5)
    undo(graph_module)
    assert graph_module.code == code
    original = decoder.state_dict()
    assert list(graph_module.state_dict()) == list(original)
    for key, value in graph_module.state_dict().items():
        assert torch.equal(value, original[key])
        assert value.stride() == original[key].stride()
