"""Calls that gain nothing because dynamo makes no graph for them: said where it can be known."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fxopt_compile


class Wrapper(nn.Module):
    """Calls the ``forward`` of a model, as sentence-transformers does."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        return self.model.forward(x)


def linear() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU()).eval()


def test_a_history_without_graphs_says_why() -> None:
    model = linear()
    model.compile(backend="fxopt")
    with torch.no_grad():
        Wrapper(model)(torch.ones(2, 4))
        assert not fxopt_compile.history(model)
        text = str(fxopt_compile.history(model))
        assert "no call of the model went through torch.compile" in text and "compile in place what is called" in text
        outer = Wrapper(model)
        outer.compile(backend="fxopt")
        outer(torch.ones(2, 4))
    assert fxopt_compile.history(model)[0].rewritten


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`:FutureWarning")  # which PEFT reads
@pytest.mark.parametrize("in_place", [True, False])
def test_calls_of_a_peft_model_reach_a_model_that_was_compiled_before(in_place: bool) -> None:
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = transformers.BertConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2, vocab_size=50
    )
    model, ids = transformers.BertModel(config).eval(), torch.randint(50, (2, 5))
    if in_place:
        model.compile(backend="fxopt")
    else:
        model = torch.compile(model, backend="fxopt")
    around = peft.get_peft_model(model, peft.LoraConfig(target_modules=["query"], r=2)).eval()
    with torch.no_grad():
        around(input_ids=ids)
    assert sum(graph.rewritten for graph in fxopt_compile.history(around))


def test_a_pickled_model_is_plain() -> None:
    model = linear()
    model.compile(backend="fxopt")
    assert pickle.loads(pickle.dumps(model))._compiled_call_impl is None
    assert copy.deepcopy(model)._compiled_call_impl is None
