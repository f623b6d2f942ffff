"""`FuseConvolutions`: which convolutions, what goes along with them, and what has to stay."""

from __future__ import annotations

from collections.abc import Callable
from itertools import cycle
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from onednn_forms import FORMS, Computes, check, operations, packed
from torch import Tensor, nn

from fxopt_core import history
from fxopt_cpu import FuseConvolutions
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import graph_of, refused

X = torch.randn(2, 3, 8, 8)
OTHERS = [(torch.randn(5, 3, 8, 8),), (torch.randn(0, 3, 8, 8),), (torch.randn(1, 3, 8, 8),)]


def conv(**options: Any) -> nn.Conv2d:
    return nn.Conv2d(3, 6, 3, **options)


ACTIVATIONS = [
    nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.Hardtanh(-1, 2), nn.Hardswish(), nn.Hardsigmoid(), nn.SiLU(),
    nn.Sigmoid(), nn.Tanh(), nn.GELU(), nn.GELU("tanh"), nn.LeakyReLU(0.3),
]  # fmt: skip


@pytest.mark.parametrize(("activation", "form"), [*zip(ACTIVATIONS, cycle(FORMS), strict=False)], ids=str)
def test_an_activation_goes_along(activation: nn.Module, form: Form) -> None:
    model = nn.Sequential(conv(), activation).eval()
    found = check(FuseConvolutions(), model, X, sites=1, form=form, others=OTHERS)
    assert [name for name in operations(found) if name != "GuardsFn"] == ["PackedConv2d"]
    assert list(found.state_dict()) == ["0_packed.weight", "0_packed.bias"]


CALLS: dict[str, tuple[Callable[[Any, Tensor], Tensor], str]] = {
    "method": (lambda m, x: m.conv(x).relu(), "relu"),
    "in-place method": (lambda m, x: m.conv(x).relu_(), "relu"),
    "function": (lambda m, x: torch.relu(m.conv(x)), "relu"),
    "in-place function": (lambda m, x: F.relu(m.conv(x), inplace=True), "relu"),
    "keyword": (lambda m, x: F.leaky_relu(input=m.conv(x), negative_slope=0.5), "leaky_relu(0.5, 0)"),
    "clamp": (lambda m, x: m.conv(x).clamp(0, 6), "hardtanh(0, 6)"),
    "clamp from below": (lambda m, x: torch.clamp(m.conv(x), min=0), "relu"),
    "gelu": (lambda m, x: F.gelu(m.conv(x), approximate="tanh"), "gelu_tanh"),
}


@pytest.mark.parametrize("call", CALLS)
def test_every_form_of_call_is_read(call: str) -> None:
    function, shown = CALLS[call]
    found = check(FuseConvolutions(), Computes(function, conv=conv()), X, sites=1)
    assert [str(layer.activation) for layer in packed(found)] == [shown]


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


def view_is_read(m: Any, x: Tensor) -> Any:
    other = x * 2
    view = other[:, 0]
    return m.one(x) + other, view * 2


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
    "other is read later": (lambda m, x: (lambda z: (m.one(x) + z, z * 2))(x * 2), ["none"]),
    "view of other is read later": (view_is_read, ["none"]),
    "other is a view": (lambda m, x: (lambda z: (m.one(x) + z[:, :3], z))(torch.cat([x, x], 1)), ["none"]),
    "other is the input": (lambda m, x: (lambda z: m.one(z) + z)(x * 2), ["none"]),
    "read by one that moves": (
        lambda m, x: (lambda z: (lambda y, w: (m.one(x) + z, w + y))(m.two(z), x * 3))(x * 2),
        ["none", "none"],
    ),
    "activation that does not go along": (lambda m, x: F.hardswish(m.one(x) + x), ["none"]),
}
EXPORTED = ("in place", "two", "alpha", "number", "view of other is read later", "read by one that moves")


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
    if "m.two" not in case and case not in ("two", "twice", "read by one that moves"):
        layers.pop("two")
    model = Computes(function, **layers)
    found = check(FuseConvolutions(), model, X, sites=len(shown), form=form, others=OTHERS)
    assert [str(layer.activation) for layer in packed(found)] == shown


OVERWRITES = {
    "plus": (False, False),
    "two": (False, True),
    "twice": (False, False),
    "other is read later": (False, False),
    "other is the input": (False, False),
    "view of other is read later": (False, False),
    "other is a view": (False, False),
    "read by one that moves": (False, True),
}


@pytest.mark.parametrize("case", OVERWRITES)
def test_a_sum_is_written_over_what_nothing_reads_any_more(case: str) -> None:
    layers = {"one": nn.Conv2d(3, 3, 3, padding=1), "two": nn.Conv2d(3, 3, 3, padding=1)}
    found = FuseConvolutions()(graph_of(Computes(SUMS[case][0], **layers), "modules", X))
    modules = [getattr(found, f"{name}_packed", None) for name in ("one", "two")]
    assert tuple(getattr(module, "overwrites", False) for module in modules) == OVERWRITES[case]


def test_a_sum_after_many_writes_in_place() -> None:
    def call(m: Any, x: Tensor) -> Tensor:
        y: Tensor = x.sin()
        for _ in range(1000):
            y = y.neg_()
        return y.add(m.one(x))

    model = Computes(call, one=nn.Conv2d(3, 3, 3, padding=1))
    (made,) = packed(FuseConvolutions()(graph_of(model, "modules", X)))
    assert made.overwrites


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
    assert len([name for name in operations(found) if name != "GuardsFn"]) == (1 if along else 2)


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


def test_rectifiers_with_hooks_stay() -> None:
    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda module, args, output: output * 3)
    found = check(FuseConvolutions(), nn.Sequential(conv(), hooked), X, sites=1)
    assert hasattr(found, "1")


def test_what_is_refused_and_why() -> None:
    hooked, shared, tied, other = conv(), conv(), conv(), conv()
    tied.weight = other.weight
    hooked.register_forward_hook(lambda module, args, output: output * 2)
    model = Computes(
        lambda m, x: [m.a(x), m.b(x), m.c(x), m.c(x + 1), m.d(x), m.e(x), m.f(x.double())],
        a=hooked, b=conv(padding=1, padding_mode="reflect"), c=shared, d=tied, e=other, f=conv().double(),
    )  # fmt: skip
    graph_module = torch.fx.symbolic_trace(model)
    FuseConvolutions()(graph_module)
    assert not history(graph_module)[-1].rewrites
    assert refused(graph_module) == [
        ("a", "hooks"), ("b", "padding-mode"), ("c", "shared-module"), ("c", "shared-module"),
        ("d", "tied-parameter"), ("e", "tied-parameter"), ("f", "unsupported-dtype"),
    ]  # fmt: skip


@pytest.mark.parametrize("function", [F.conv1d, F.conv2d, F.conv3d, F.conv_transpose1d, F.conv_transpose3d])
def test_a_computed_weight_of_any_convolution_is_refused(function: Callable[..., Tensor]) -> None:
    graph_module = FuseConvolutions()(torch.fx.symbolic_trace(lambda x, weight: function(x, weight.exp())), expect=0)
    assert [reason for _, reason in refused(graph_module)] == ["computed-weight"]


def test_a_processor_without_the_operators_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    graph_module = torch.fx.symbolic_trace(nn.Sequential(conv(), nn.ReLU()))
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    FuseConvolutions()(graph_module)
    (refusal,) = history(graph_module)[-1].refusals
    assert (refusal.site, refusal.reason) == ("0", "no-operators")
    assert "`0`" in refusal.message
    assert "oneDNN" in refusal.message


def test_the_parameters_are_those_of_before_with_their_flags() -> None:
    layer = conv()
    layer.weight.requires_grad_(False)
    graph_module = FuseConvolutions()(torch.fx.symbolic_trace(nn.Sequential(layer, nn.ReLU()).train()))
    (found,) = packed(graph_module)
    assert found.training
    assert found.weight is layer.weight and graph_module.get_parameter("0_packed.weight") is layer.weight
    assert found.bias is layer.bias


def test_meta_modules_are_rewritten_without_memory() -> None:
    graph_module = FuseConvolutions()(torch.fx.symbolic_trace(nn.Sequential(conv(), nn.ReLU()).to("meta")), expect=1)
    assert graph_module(X.to("meta")).is_meta
