"""`FoldLayerNormAffine`: weights and biases of layer norms and RMS norms move into the linear layers behind them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt_checkpoints.load import load_original_state_dict, original_state_dict
from fxopt_core import NotReversibleError
from fxopt_norm import FoldLayerNormAffine
from fxopt_testing import ModelCase, assert_rewrites, conformance_tests
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import graph_of, refused

FORMS: tuple[Form, ...] = ("modules", "functions", "export-dynamic")
X = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
OTHERS = [(torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(1)),)]
Make = Callable[[], nn.Module]


class WrittenRMSNorm(nn.Module):
    """An RMS norm as models of transformers write it out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x.to(torch.float32) * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


class Normed(nn.Module):
    """A normalisation, and the linear layers that read it."""

    def __init__(self, norm: Make, *biases: bool, more: Callable[[Normed, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.norm, self.more = norm(), more
        self.layers = nn.ModuleList(nn.Linear(4, 3 + place, bias=bias) for place, bias in enumerate(biases))
        with torch.no_grad():
            for parameter in self.norm.parameters():
                parameter.normal_()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        read = [layer(y) for layer in self.layers]
        return torch.cat([*read, *([] if self.more is None else [self.more(self, y)])], -1)


MODELS: dict[str, Make] = {
    "layer norm": lambda: Normed(lambda: nn.LayerNorm(4), True, False, True),
    "layer norm without bias": lambda: Normed(lambda: nn.LayerNorm(4, bias=False), False),
    "RMS norm": lambda: Normed(lambda: nn.RMSNorm(4, eps=1e-4), True, False),
    "RMS norm of the dtype's eps": lambda: Normed(lambda: nn.RMSNorm(4), False),
    "RMS norm that is written out": lambda: Normed(WrittenRMSNorm, True, False),
}
for_each_model = pytest.mark.parametrize("make", MODELS.values(), ids=list(MODELS))


@for_each_model
def test_the_affine_part_is_folded_in_each_form(make: Make) -> None:
    torch.manual_seed(0)
    model = make().eval()
    folded = assert_rewrites(FoldLayerNormAffine(), model, X, count=1, others=OTHERS)
    left = {tuple(tensor.shape) for key, tensor in folded.state_dict().items() if "folded" not in key}
    assert left == set()


@for_each_model
def test_checkpoints_go_both_ways(make: Make) -> None:
    torch.manual_seed(0)
    model, other = make().eval(), make().eval()
    graph_module = FoldLayerNormAffine()(graph_of(model, "modules", X), expect=1)
    again = make().eval()
    again.load_state_dict(original_state_dict(graph_module))
    torch.testing.assert_close(again(X), model(X), rtol=1e-5, atol=1e-5)
    load_original_state_dict(graph_module, other.state_dict())
    torch.testing.assert_close(graph_module(X), other(X), rtol=1e-5, atol=1e-5)


def test_biases_that_no_norm_gives_do_not_come_back() -> None:
    model = Normed(lambda: nn.LayerNorm(4), False, False).eval()
    graph_module = FoldLayerNormAffine()(graph_of(model, "modules", X), expect=1)
    with torch.no_grad():
        graph_module.get_parameter("layers.0_folded.bias").add_(1.0)
    with pytest.raises(NotReversibleError, match="has no bias"):
        original_state_dict(graph_module)


def test_half_precision_is_rounded_once() -> None:
    model = Normed(lambda: nn.LayerNorm(4), True).eval().half()
    graph_module = FoldLayerNormAffine()(graph_of(model, "modules", X.half()), expect=1)
    layer: Any = model.layers[0]
    wanted = (layer.weight.double() * model.norm.get_parameter("weight").double()).half()
    assert torch.equal(graph_module.get_parameter("layers.0_folded.weight"), wanted)


def _tied(model: Any) -> None:
    model.layers[1].weight = model.layers[0].weight


def _enormous(model: Any) -> None:
    with torch.no_grad():
        model.norm.weight.fill_(1e30)
        model.layers[0].weight.fill_(1e30)


LEFT_ALONE: dict[str, tuple[str, Make]] = {
    "another user": ("several-users", lambda: Normed(lambda: nn.LayerNorm(4), True, more=lambda m, y: y * 2)),
    "a frozen norm": ("mixed-requires-grad", lambda: Normed(lambda: nn.LayerNorm(4).requires_grad_(False), True)),
    "rows, too": ("wrong-axis", lambda: Normed(lambda: nn.LayerNorm((5, 4)), True)),
}


@pytest.mark.parametrize(("reason", "make"), LEFT_ALONE.values(), ids=list(LEFT_ALONE))
def test_what_cannot_be_folded_is_left_alone(reason: str, make: Make) -> None:
    assert [code for _, code in refused(assert_rewrites(FoldLayerNormAffine(), make().eval(), X, count=0))] == [reason]


@pytest.mark.parametrize(
    ("spoil", "reason"),
    [
        (nn.Module.train, "training"),
        (_tied, "tied-parameter"),
        (lambda model: model.layers[0].register_forward_hook(lambda *_: None), "hooks"),
        (lambda model: model.norm.double(), "dtype-mismatch"),
        (_enormous, "out-of-range"),
    ],
)
def test_what_is_wrong_with_a_model_is_named(spoil: Callable[[Any], Any], reason: str) -> None:
    model = nn.Sequential(Normed(lambda: nn.LayerNorm(4), True, False)).eval()
    inner: Any = model[0]
    if reason == "tied-parameter":
        inner.layers[1] = nn.Linear(4, 3).eval()
    spoil(inner)
    graph_module = torch.fx.symbolic_trace(model)
    FoldLayerNormAffine()(graph_module, expect=0)
    assert [code for _, code in refused(graph_module)] == [reason]


def test_an_input_that_is_written_before_a_layer_reads_the_product() -> None:
    class Written(WrittenRMSNorm):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x: Tensor) -> Tensor:
            normed = F.normalize(x, dim=-1)
            gained = normed * self.weight
            normed.mul_(2.0)
            return F.linear(gained, self.layer.weight, self.layer.bias)

    rewritten = assert_rewrites(FoldLayerNormAffine(), Written().eval(), X, count=0, form="functions", gradients=False)
    assert [code for _, code in refused(rewritten)] == ["mutated"]


test_conformance = conformance_tests(
    FoldLayerNormAffine(),
    models=[ModelCase("layer norm", MODELS["layer norm"], X), ModelCase("RMS norm", MODELS["RMS norm"], X)],
)
