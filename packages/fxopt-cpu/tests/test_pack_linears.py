"""`PackLinears` and `PackedLinear`."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from onednn_forms import FORMS, check, operations, packed
from torch import nn

from fxopt_core import history
from fxopt_cpu import PackedLinear, PackLinears
from fxopt_cpu.layers import packed_linear
from fxopt_cpu.layers.activations import RELU
from fxopt_cpu.operators.onednn import LINEAR
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import refused

X = torch.randn(3, 4)
OTHERS = [(torch.randn(7, 4),), (torch.randn(0, 4),), (torch.randn(1, 4),)]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The activation of each call of the operator."""
    called: list[str] = []

    def recorded(*args: Any) -> Any:
        called.append(args[3])
        return LINEAR(*args)

    monkeypatch.setattr(packed_linear, "LINEAR", recorded)
    return called


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    "activation",
    [nn.Identity(), nn.ReLU(), nn.ReLU6(), nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Hardswish(), nn.LeakyReLU(0.2)],
    ids=str,
)
def test_an_activation_goes_along_with_a_product(form: Form, bias: bool, activation: nn.Module) -> None:
    model = nn.Sequential(nn.Linear(4, 6, bias=bias), activation).eval()
    found = check(PackLinears(), model, X, sites=1, form=form, others=OTHERS)
    expected = (
        ["PackedLinear", "Identity"] if type(activation) is nn.Identity and form == "modules" else ["PackedLinear"]
    )
    assert [name for name in operations(found) if name != "GuardsFn"] == expected
    assert list(found.state_dict()) == ["0_packed.weight", *(["0_packed.bias"] if bias else [])]


@pytest.mark.parametrize("slow", [frozenset(), frozenset({"gelu", "swish", "tanh"})])
@pytest.mark.parametrize("activation", [nn.GELU(), nn.GELU("tanh"), nn.SiLU(), nn.Tanh()], ids=str)
@torch.no_grad()
def test_an_activation_that_is_slow_in_the_operator_follows_it(
    activation: nn.Module, slow: frozenset[str], calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "SLOW_IN_LINEAR", slow)
    model = nn.Sequential(nn.Linear(4, 6), activation).eval()
    found = PackLinears()(torch.fx.symbolic_trace(model))
    torch.testing.assert_close(found(X), model(X))
    layer = found.get_submodule("0_packed")
    assert isinstance(layer, PackedLinear)
    assert calls == ["none" if slow else layer.activation.name]


def test_inputs_of_more_dimensions() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU()).eval()
    others = [
        (torch.randn(2, 5, 4),),
        (torch.randn(2, 3, 4, 4).transpose(1, 2),),
        (torch.randn(4),),
        (torch.randn(9, 4),),
    ]
    check(PackLinears(), model, torch.randn(2, 3, 4), sites=1, others=others)


@pytest.mark.parametrize("mkl", [True, False])
@torch.no_grad()
def test_many_rows_are_no_work_for_the_operator_where_mkl_is_faster(
    mkl: bool, calls: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_linear, "MKL_IS_FASTER", mkl)
    model = nn.Sequential(nn.Linear(6, 4), nn.GELU(), nn.Linear(4, 6)).eval()
    found, many = PackLinears()(torch.fx.symbolic_trace(model)), torch.randn(8, 8, 6)
    torch.testing.assert_close(found(many), model(many))
    assert len(calls) == (1 if mkl else 2)
    found(many[:7])
    assert len(calls) == (3 if mkl else 4)


@torch.no_grad()
def test_one_row_is_no_work_for_the_operator(calls: list[str]) -> None:
    layer = PackLinears()(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 6))))
    for shape in ((4,), (1, 4), (1, 1, 4), (0, 4)):
        layer(torch.randn(shape))
    assert calls == []
    layer(torch.randn(2, 4))
    assert calls == ["none"]


@torch.no_grad()
def test_the_weight_is_packed_anew_when_it_changes(calls: list[str]) -> None:
    layer = PackedLinear(4, 6, activation=RELU)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    for change in (
        lambda: None,
        lambda: layer.weight.mul_(2),
        lambda: setattr(layer, "weight", nn.Parameter(torch.randn(6, 4))),
        lambda: layer.load_state_dict({"weight": torch.randn(6, 4), "bias": torch.zeros(6)}),
        lambda: layer.bfloat16().float(),
    ):
        change()
        torch.testing.assert_close(layer(X), F.relu(F.linear(X, layer.weight, layer.bias)))
    assert len(calls) == 5
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(again(X), layer(X))


@torch.no_grad()
def test_other_dtypes_and_modes_go_the_plain_way(calls: list[str]) -> None:
    layer = PackLinears()(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 6), nn.ReLU())))
    with torch.autocast("cpu"):
        assert layer(X).dtype == torch.bfloat16
    torch.vmap(layer)(X)
    copy.deepcopy(layer).double()(X.double())
    assert calls == []
    with pytest.raises(RuntimeError):
        layer(torch.randn(3, 5))


def test_linears_that_are_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4, dtype=torch.float64)).eval()
    model[1].weight = model[0].weight
    graph_module = PackLinears()(torch.fx.symbolic_trace(model))
    assert refused(graph_module) == [("0", "tied-parameter"), ("1", "tied-parameter"), ("2", "unsupported-dtype")]
    assert not history(graph_module)[-1].rewrites
    assert packed(graph_module) == []
