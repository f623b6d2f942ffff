"""`FuseConvolutions`: which convolutions, what goes along with them, and what has to stay."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from onednn_forms import FORMS, calls, check, packed
from site_passes import Computes
from torch import Tensor, nn

from fxopt_core import history
from fxopt_cpu import FuseConvolutions
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import refused

X = torch.randn(2, 3, 8, 8)
OTHERS = [(torch.randn(5, 3, 8, 8),), (torch.randn(0, 3, 8, 8),), (torch.randn(1, 3, 8, 8),)]


def conv(**options: Any) -> nn.Conv2d:
    return nn.Conv2d(3, 6, 3, **options)


ACTIVATIONS = [nn.ReLU(inplace=True), nn.Hardtanh(-1, 2), nn.GELU("tanh")]


@pytest.mark.parametrize(("activation", "form"), [*zip(ACTIVATIONS, cycle(FORMS), strict=False)], ids=str)
def test_an_activation_goes_along(activation: nn.Module, form: Form) -> None:
    model = nn.Sequential(conv(), activation).eval()
    found = check(FuseConvolutions(), model, X, sites=1, form=form, others=OTHERS)
    assert calls(found) == 1
    assert list(found.state_dict()) == ["0_packed.weight", "0_packed.bias"]


NOT_ALONG: dict[str, Callable[[Any, Tensor], Any]] = {
    "another reader": lambda m, x: (lambda y: torch.relu(y) + y)(m.conv(x)),
    "returned": lambda m, x: (lambda y: (torch.relu(y), y))(m.conv(x)),
    "clamp from above": lambda m, x: m.conv(x).clamp(max=1),
    "clamp by tensors": lambda m, x: m.conv(x).clamp(x.mean(), x.max()),
    "another value": lambda m, x: torch.add(m.conv(x), torch.relu(x).mean(), alpha=2),
    "softplus": lambda m, x: F.softplus(m.conv(x)),
}


@pytest.mark.parametrize("case", NOT_ALONG)
def test_what_does_not_go_along_stays(case: str) -> None:
    found = check(FuseConvolutions(), Computes(NOT_ALONG[case], conv=conv()), X, sites=1)
    assert [str(layer.activation) for layer in packed(found)] == ["none"]


SUMS: dict[str, tuple[Callable[[Any, Tensor], Any], list[str]]] = {
    "plus": (lambda m, x: m.one(x) + x, ["none"]),
    "other first": (lambda m, x: x + m.one(x), ["none"]),
    "in place": (lambda m, x: m.one(x).add_(x), ["none"]),
    "rectified": (lambda m, x: F.relu(torch.add(m.one(x), x)), ["relu"]),
    "two": (lambda m, x: F.relu(m.one(x) + m.two(x)), ["none", "relu"]),
    "own activation": (lambda m, x: F.relu(m.one(x)) + x, ["relu"]),
    "alpha": (lambda m, x: torch.add(m.one(x), x, alpha=2), ["none"]),
    "itself": (lambda m, x: (lambda y: y + y)(m.one(x)), ["none"]),
    "broadcast": (lambda m, x: m.one(x) + x.mean((2, 3), keepdim=True), ["none"]),
    "number": (lambda m, x: m.one(x) + 1.5, ["none"]),
    "into the other": (lambda m, x: (lambda z: (z.add_(m.one(x)), z * 2))(x * 1), ["none"]),
    "twice": (lambda m, x: (lambda y: F.relu(y + m.two(y)))(F.relu(x + m.one(x))), ["relu", "relu"]),
    "activation that does not go along": (lambda m, x: F.hardswish(m.one(x) + x), ["none"]),
}
EXPORTED = ("in place", "two", "alpha", "number")


@pytest.mark.parametrize(
    ("case", "form"),
    [
        *((case, "modules") for case in SUMS),
        *(pytest.param(case, "export-dynamic", marks=() if case in EXPORTED else pytest.mark.nightly) for case in SUMS),
    ],
)
def test_a_sum_goes_along_where_it_may(form: Form, case: str) -> None:
    function, shown = SUMS[case]
    layers = {"one": nn.Conv2d(3, 3, 3, padding=1), "two": nn.Conv2d(3, 3, 3, padding=1)}
    if case not in ("two", "twice"):
        layers.pop("two")
    model = Computes(function, **layers)
    found = check(FuseConvolutions(), model, X, sites=len(shown), form=form, others=OTHERS)
    assert [str(layer.activation) for layer in packed(found)] == shown


PADDINGS: dict[str, tuple[nn.Module, dict[str, Any], bool]] = {
    "even": (nn.ZeroPad2d(1), {}, True),
    "constant": (nn.ConstantPad2d((1, 2, 0, 3), 0.0), {}, True),
    "uneven with stride": (nn.ZeroPad2d((0, 1, 0, 1)), {"stride": 2}, True),
    "with own padding": (nn.ZeroPad2d((1, 0, 2, 0)), {"padding": 1, "stride": 3}, True),
    "with a name": (nn.ZeroPad2d(1), {"padding": "same"}, False),
    "of ones": (nn.ConstantPad2d(1, 1.0), {}, False),
    "negative": (nn.ZeroPad2d(-1), {}, False),
    "reflected": (nn.ReflectionPad2d(1), {}, False),
}


@pytest.mark.parametrize("case", PADDINGS)
def test_zeros_before_a_convolution_go_along(case: str) -> None:
    padding, options, along = PADDINGS[case]
    model = nn.Sequential(padding, conv(**options)).eval()
    found = check(FuseConvolutions(), model, X, sites=1, others=OTHERS)
    assert calls(found) == (1 if along else 2)


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")
@pytest.mark.parametrize("padding", ["same", "valid", 1, (1, 2)])
def test_padding_of_every_kind(padding: Any) -> None:
    model = nn.Sequential(nn.Conv2d(3, 6, (4, 3), padding=padding, dilation=(1, 2), bias=False)).eval()
    check(FuseConvolutions(), model, X, sites=1, others=OTHERS)


def test_padded_values_that_are_read_elsewhere_stay() -> None:
    model = Computes(lambda m, x: (lambda y: (m.conv(y), y))(F.pad(x, (1, 1, 1, 1))), conv=conv())
    found = check(FuseConvolutions(), model, X, sites=1)
    assert [layer.padding for layer in packed(found)] == [((0, 0), (0, 0))]


WRITTEN: dict[str, Callable[[Any, Tensor], Any]] = {
    "input of a sum": lambda m, x: (lambda z, y, w: y + w)(z := x * 1, m.one(z), z.mul_(2)),
    "padded": lambda m, x: (lambda p: (lambda w: m.one(p) + w)(p.mul_(2).mean()))(F.pad(x, (1, 1, 1, 1))),
    "result": lambda m, x: (lambda y: torch.relu(y.mul_(3)))(m.one(x)),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_values_that_are_written_between(case: str) -> None:
    model = Computes(WRITTEN[case], one=nn.Conv2d(3, 3, 3, padding=1))
    check(FuseConvolutions(), model, X, sites=1)


def test_a_rectifier_that_serves_twice_is_kept_as_long_as_something_calls_it() -> None:
    model = Computes(lambda m, x: m.act(m.two(m.act(m.one(x)))), one=conv(), two=nn.Conv2d(6, 3, 1), act=nn.ReLU())
    found = check(FuseConvolutions(), model, X, sites=2)
    assert not hasattr(found, "act")
    model = Computes(lambda m, x: m.act(m.one(m.act(x))), one=conv(), act=nn.ReLU())
    assert hasattr(check(FuseConvolutions(), model, X, sites=1), "act")


@pytest.mark.parametrize("function", [F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose3d])
def test_a_computed_weight_of_any_convolution_is_refused(function: Callable[..., Tensor]) -> None:
    graph_module = FuseConvolutions()(torch.fx.symbolic_trace(lambda x, weight: function(x, weight.exp())), expect=0)
    assert [reason for _, reason in refused(graph_module)] == ["computed-weight"]


def test_a_convolution_that_does_not_pad_with_zeros_is_refused() -> None:
    graph_module = FuseConvolutions()(torch.fx.symbolic_trace(nn.Sequential(conv(padding=1, padding_mode="reflect"))))
    assert [reason for _, reason in refused(graph_module)] == ["padding-mode"]


def test_a_processor_without_the_operators_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    graph_module = torch.fx.symbolic_trace(nn.Sequential(conv(), nn.ReLU()))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    FuseConvolutions()(graph_module)
    (refusal,) = history(graph_module)[-1].refusals
    assert (refusal.site, refusal.reason) == ("0", "no-operators")
    assert "`0`" in refusal.message
    assert "oneDNN" in refusal.message


def test_meta_modules_are_rewritten_without_memory() -> None:
    graph_module = FuseConvolutions()(torch.fx.symbolic_trace(nn.Sequential(conv(), nn.ReLU()).to("meta")), expect=1)
    assert graph_module(X.to("meta")).is_meta
