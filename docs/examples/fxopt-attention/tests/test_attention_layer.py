"""A layer of this distribution's own: it goes wherever fxopt's go."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

import fxopt_attention.plugin
from fxopt_attention import FuseQueryScale, ScaledLinear
from fxopt_capture import capture, load, save
from fxopt_checkpoints import load_original_state_dict, original_state_dict
from fxopt_core import LayersPlugin, history, registry, undo
from fxopt_testing import assert_rewrites, conformance_tests

PLUGIN: LayersPlugin = fxopt_attention.plugin


class Scaled(nn.Module):
    """A linear layer, and the product of what it computes with a number."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.linear(x) * 0.3
        return y


X = torch.randn(3, 4)

test_conformance = conformance_tests(FuseQueryScale())


@pytest.fixture
def fused() -> GraphModule:
    return FuseQueryScale()(capture(Scaled().eval(), (X,)), expect=1)


@pytest.mark.parametrize("form", ["modules", "functions", "export"])
@pytest.mark.parametrize("bias", [True, False])
def test_every_form_of_graph(form: Literal["modules", "functions", "export"], bias: bool) -> None:
    result = assert_rewrites(FuseQueryScale(), Scaled(bias=bias), X, count=1, form=form)
    assert type(result.get_submodule("linear_scaled")) is ScaledLinear


def test_the_registry_has_it() -> None:
    assert registry().layers()["fxopt_attention.scaled_linear:ScaledLinear"] is ScaledLinear


def test_archives_hold_it_and_undo_what_they_hold(fused: GraphModule, tmp_path: Path) -> None:
    save(fused, tmp_path / "fused.fxopt")
    loaded = load(tmp_path / "fused.fxopt")
    layer = loaded.get_submodule("linear_scaled")
    assert type(layer) is ScaledLinear
    assert layer.factor == 0.3
    assert torch.equal(loaded(X), fused(X))
    assert len(history(loaded)) == 1
    plain = undo(loaded)
    assert type(plain.get_submodule("linear")) is nn.Linear
    assert torch.equal(plain(X), undo(fused)(X))


def test_pickles_and_copies_undo_it(fused: GraphModule) -> None:
    for twin in (pickle.loads(pickle.dumps(fused)), copy.deepcopy(fused)):
        assert torch.equal(twin(X), fused(X))
        assert [*undo(twin).state_dict()] == ["linear.weight", "linear.bias"]


def test_checkpoints_of_the_original_go_in_and_come_back(fused: GraphModule) -> None:
    other = Scaled()
    load_original_state_dict(fused, other.state_dict())
    torch.testing.assert_close(fused(X), other(X))
    assert torch.equal(original_state_dict(fused)["linear.weight"], other.linear.weight.detach())
