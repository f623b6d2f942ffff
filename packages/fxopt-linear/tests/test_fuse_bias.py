"""FuseBiasInLinear: where the bias becomes a column, where it stays, and that undoing brings it back."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from site_passes import Computes
from torch import Tensor, nn

from fxopt_core import iter_nodes
from fxopt_linear import FuseBiasInLinear
from fxopt_testing import assert_rewrites
from fxopt_testing.forms import TRACED, Form
from fxopt_testing.rewrites import FORMS, graph_of, refused


class Network(nn.Module):
    """Two layers with bias, one without."""

    def __init__(self, out_features: int = 3) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 5, bias=False)
        self.last = nn.Linear(5, out_features)

    def forward(self, x: Tensor) -> Any:
        return self.last(input=self.second(self.first(x).relu()).tanh())


OTHERS: list[tuple[Tensor, ...]] = [
    (torch.randn(0, 4),),
    (torch.randn(7, 4),),
    (torch.randn(4),),
    (torch.randn(2, 3, 4),),
    (torch.randn(2, 3, 5, 4).to(memory_format=torch.channels_last),),
    (torch.randn(4, 3).t(),),
]


@pytest.mark.parametrize(
    ("form", "out_features"), [*((form, 3) for form in FORMS if form != "export"), ("export-dynamic", 1)]
)
def test_every_bias_becomes_a_column(form: Form, out_features: int) -> None:
    fused = assert_rewrites(
        FuseBiasInLinear(), Network(out_features), torch.randn(3, 4), count=2, form=form, others=OTHERS
    )
    assert list(fused.state_dict()) == ["second.weight", "first_with_bias.weight", "last_with_bias.weight"]
    last = fused.get_submodule("last_with_bias")
    assert isinstance(last, nn.Linear)
    assert (last.in_features, last.out_features, last.bias is None, last.training) == (
        6,
        out_features,
        True,
        form in TRACED,
    )


def test_a_layer_called_twice_is_fused_once() -> None:
    twice = Computes(lambda m, x: m.layer(m.layer(x).relu()), layer=nn.Linear(4, 4))
    fused = assert_rewrites(FuseBiasInLinear(), twice, torch.randn(3, 4), count=1, others=OTHERS)
    assert list(fused.state_dict()) == ["layer_with_bias.weight"]
    assert [node.op for node in iter_nodes(fused.graph)].count("call_module") == 2


def test_flags_are_kept_and_a_mix_is_refused() -> None:
    model = Network().eval().requires_grad_(False)
    graph_module = graph_of(model, "modules", torch.randn(3, 4))
    FuseBiasInLinear()(graph_module, expect=2)
    assert not any(p.requires_grad for p in graph_module.parameters())
    assert not any(m.training for m in graph_module.modules())
    model.last.bias.requires_grad_(True)
    for form in ("modules", "export-dynamic"):
        fused = assert_rewrites(FuseBiasInLinear(), model, torch.randn(3, 4), count=1, form=form)
        assert refused(fused) == [("last", "mixed-requires-grad")]


def test_one_weight_with_two_biases_is_refused() -> None:
    w, a, b = (nn.Parameter(torch.randn(*size)) for size in ((4, 4), (4,), (4,)))
    two = Computes(lambda m, x: F.linear(F.linear(x, m.w, m.a), m.w, m.b), w=w, a=a, b=b)
    fused = assert_rewrites(FuseBiasInLinear(), two, torch.randn(3, 4), count=0)
    assert {reason for _, reason in refused(fused)} == {"tied-parameter"}


def test_a_module_whose_parameters_a_function_reads_is_left_alone() -> None:
    class Both(Network):
        def forward(self, x: Tensor) -> Any:
            return F.linear(x, self.first.weight, self.first.bias) + self.first(x)

    fused = assert_rewrites(FuseBiasInLinear(), Both(), torch.randn(3, 4), count=0)
    assert {reason for _, reason in refused(fused)} <= {"shared-module", "tied-parameter"}
