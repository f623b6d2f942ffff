"""Inputs of texts that a call leaves out: the graph takes what the model takes, or asks for them."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from archive_models import in_every_form
from torch import Tensor, nn

from fxopt_capture import capture, symbolic_trace
from fxopt_core.errors import CaptureError

BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64, "vocab_size": 99}
GPT2 = {"n_embd": 32, "n_layer": 1, "n_head": 4, "vocab_size": 99, "bos_token_id": 1, "eos_token_id": 2}
XLM = {"emb_dim": 32, "n_layers": 1, "n_heads": 4, "vocab_size": 99}


def build(transformers: ModuleType, name: str, **options: object) -> nn.Module:
    torch.manual_seed(0)
    cls = getattr(transformers, name)
    model: nn.Module = cls(cls.config_class(**options)).eval()
    return model


def tokens() -> dict[str, Tensor]:
    ids = torch.randint(3, 99, (3, 7))
    mask, types = torch.ones_like(ids), torch.zeros_like(ids)
    mask[0, 4:], types[:, 3:] = 0, 1
    return {"input_ids": ids, "attention_mask": mask, "token_type_ids": types}


def test_what_is_left_out_is_what_the_model_has(transformers: ModuleType, tmp_path: Path) -> None:
    model = build(transformers, "BertModel", **BERT)
    captured = capture(model, kwargs=tokens())
    for graph_module in in_every_form(captured, tmp_path):
        given = tokens()
        for names in ((), ("token_type_ids",), ("attention_mask",), ("token_type_ids", "attention_mask")):
            rest = {name: None if name in names else value for name, value in given.items()}
            with torch.no_grad():
                expected = model(**rest)[0]
                torch.testing.assert_close(graph_module(**rest)[0], expected, rtol=1e-6, atol=1e-6)
                given_rest = {name: value for name, value in rest.items() if value is not None}
                torch.testing.assert_close(graph_module(**given_rest)[0], expected, rtol=1e-6, atol=1e-6)
        with pytest.raises(CaptureError, match="needs `input_ids`"):
            graph_module(attention_mask=given["attention_mask"])


@pytest.mark.parametrize(
    ("name", "options", "lacking"),
    [
        # It adds nothing for absent token types, and an embedding for zeros.
        ("GPT2Model", GPT2, "token_type_ids"),
        # It reads an absent mask off the padding.
        ("XLMModel", XLM, "attention_mask"),
    ],
)
def test_what_the_model_has_in_another_way_is_asked_for(
    name: str, options: dict[str, object], lacking: str, transformers: ModuleType
) -> None:
    captured = symbolic_trace(build(transformers, name, **options), list(tokens()))
    rest = {key: value for key, value in tokens().items() if key != lacking}
    with pytest.raises(CaptureError, match=f"needs `{lacking}`"):
        captured(**rest)


def test_nothing_is_left_out_of_a_capture_that_was_not_compared(transformers: ModuleType) -> None:
    captured = capture(build(transformers, "BertModel", **BERT), kwargs=tokens(), compare=False)
    with pytest.raises(CaptureError, match="needs `attention_mask`, `token_type_ids`"):
        captured(input_ids=tokens()["input_ids"])
