"""`FoldScaleInConv` and `FoldScaleInLinear`: constants behind layers become part of their weights."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from norm_models import Computes
from torch import Tensor, nn

from fxopt_capture import capture
from fxopt_checkpoints.load import load_original_state_dict, original_state_dict
from fxopt_core import NotReversibleError, Transformation
from fxopt_norm import FoldScaleInConv, FoldScaleInLinear
from fxopt_testing import ModelCase, assert_rewrites, conformance_tests
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import graph_of, refused

FORMS: tuple[Form, ...] = ("modules", "functions", "export-dynamic")
ROWS = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
IMAGES = torch.randn(2, 4, 6, 6, generator=torch.Generator().manual_seed(0))
Make = Callable[[], nn.Module]


def scaled(
    layer: nn.Module, forward: Callable[[Any, Tensor], Tensor], shape: tuple[int, ...] | None = None
) -> nn.Module:
    """Return a layer and what is done with its result, and a parameter `c` and a buffer `d` of a shape."""
    model = Computes(forward, layer=layer)
    if shape is not None:
        model.c = nn.Parameter(torch.rand(shape) + 0.5)
        model.register_buffer("d", torch.rand(shape) + 0.5)
    return model.eval()


def linear(forward: Callable[[Any, Tensor], Tensor], *, bias: bool = True) -> Make:
    return lambda: scaled(nn.Linear(4, 3, bias=bias), forward, (3,))


def conv(forward: Callable[[Any, Tensor], Tensor], shape: tuple[int, ...] = (4, 1, 1), **settings: Any) -> Make:
    return lambda: scaled(nn.Conv2d(4, 4, 3, **settings), forward, shape)


def transposed(forward: Callable[[Any, Tensor], Tensor]) -> Make:
    return lambda: scaled(nn.ConvTranspose2d(4, 4, 2, groups=2), forward, (1, 4, 1, 1))


def in_place(model: Any, x: Tensor) -> Tensor:
    y: Tensor = model.layer(x).add_(1)
    y /= 4.0
    return y


CASES: dict[str, tuple[int, Make]] = {
    "product with a number": (1, linear(lambda m, x: m.layer(x) * 0.3)),
    "without bias": (1, linear(lambda m, x: 0.3 * m.layer(x), bias=False)),
    "number minus layer": (1, linear(lambda m, x: 3 - m.layer(x), bias=False)),
    "alpha": (2, linear(lambda m, x: torch.add(m.layer(x), m.c, alpha=2).sub(1.5, alpha=3), bias=False)),
    "rsub": (1, linear(lambda m, x: torch.rsub(m.layer(x), m.c, alpha=2))),
    "in place": (2, linear(in_place)),
    "parameter and buffer": (2, linear(lambda m, x: m.layer(x) * m.c + m.d)),
    "quotient by a buffer": (1, linear(lambda m, x: m.layer(x) / m.d)),
    "channels": (2, conv(lambda m, x: m.c * m.layer(x) - m.d)),
    "groups without bias": (1, conv(lambda m, x: m.layer(x) + m.c, groups=2, bias=False)),
    "one value": (1, conv(lambda m, x: m.layer(x).div(m.c), (1,))),
    "batched channels, transposed": (2, transposed(lambda m, x: m.layer(x) * m.c + m.d)),
    "one dimension": (1, lambda: scaled(nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 2, 3)), lambda m, x: m.layer(x) * 2)),
}
for_each_case = pytest.mark.parametrize(("sites", "make"), CASES.values(), ids=list(CASES))


def of(model: Any) -> tuple[Transformation, Tensor]:
    """The pass for a model, and its input."""
    return (FoldScaleInLinear(), ROWS) if isinstance(model.layer, nn.Linear) else (FoldScaleInConv(), IMAGES)


@for_each_case
def test_constants_are_folded_in_each_form(sites: int, make: Make) -> None:
    torch.manual_seed(0)
    model = make()
    transformation, x = of(model)
    folded = assert_rewrites(transformation, model, x, count=sites)
    assert not any(word in folded.code for word in (" + ", " - ", " * ", " / ", "add", "sub", "mul", "div"))


@for_each_case
def test_checkpoints_go_both_ways(sites: int, make: Make) -> None:
    torch.manual_seed(0)
    model, other, again = make(), make(), make()
    transformation, x = of(model)
    graph_module = graph_of(model, "modules", x)
    transformation(graph_module, expect=sites)
    again.load_state_dict(original_state_dict(graph_module), strict=False)
    left = dict(model.named_buffers()) | dict(model.named_parameters())
    for key in left.keys() - original_state_dict(graph_module).keys():
        assert key in ("c", "d")  # tensors that the model does not use
    torch.testing.assert_close(again(x), model(x), rtol=1e-4, atol=1e-5)
    load_original_state_dict(graph_module, other.state_dict(), strict=False)
    torch.testing.assert_close(graph_module(x), other(x), rtol=1e-4, atol=1e-5)


def _integer(model: Any) -> None:
    model.register_buffer("d", torch.ones(3, dtype=torch.int64))


def _double(model: Any) -> None:
    model.register_buffer("d", torch.ones(3, dtype=torch.float64))


def _frozen(model: Any) -> None:
    model.layer.requires_grad_(False)


LEFT_ALONE: dict[str, tuple[str, Make, Callable[[Any], Any]]] = {
    "zero": ("out-of-range", linear(lambda m, x: m.layer(x) * 0), lambda _: None),
    "too small": ("out-of-range", linear(lambda m, x: m.layer(x) * 1e-60), lambda _: None),
    "rounded": ("rounding-mode", linear(lambda m, x: torch.div(m.layer(x), 2, rounding_mode="floor")), lambda _: None),
    "columns": ("wrong-axis", conv(lambda m, x: m.layer(x) * m.c, (4,)), lambda _: None),
    "integers": ("dtype-mismatch", linear(lambda m, x: m.layer(x) * m.d), _integer),
    "float64": ("dtype-mismatch", linear(lambda m, x: m.layer(x) * m.d), _double),
    "frozen": ("mixed-requires-grad", linear(lambda m, x: m.layer(x) * m.c), _frozen),
    "training": ("training", linear(lambda m, x: m.layer(x) * 2), nn.Module.train),
    "hooks": (
        "hooks",
        linear(lambda m, x: m.layer(x) * 2),
        lambda model: model.layer.register_forward_hook(lambda *_: None),
    ),
}


@pytest.mark.parametrize(("reason", "make", "spoil"), LEFT_ALONE.values(), ids=list(LEFT_ALONE))
def test_what_cannot_be_folded_is_left_alone(reason: str, make: Make, spoil: Callable[[Any], Any]) -> None:
    model = make()
    spoil(model)
    transformation, x = of(model)
    graph_module = graph_of(model, "modules", x)
    transformation(graph_module, expect=0)
    assert [code for _, code in refused(graph_module)] == [reason]


HELD: dict[str, tuple[Callable[[Any, Tensor], Tensor], tuple[int, ...]]] = {
    "scale": (lambda m, x: m.layer(x) * m.k, ()),
    "one": (lambda m, x: m.layer(x) / m.k, (1,)),
    "scales": (lambda m, x: m.k * m.layer(x), (4,)),
    "shifts": (lambda m, x: m.layer(x) - m.k, (4,)),
    "minuend": (lambda m, x: m.k - m.layer(x), (4,)),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("is_attribute", [True, False], ids=["attribute", "buffer"])
@pytest.mark.parametrize("layer", ["linear", "conv"])
@pytest.mark.parametrize(("forward", "shape"), HELD.values(), ids=list(HELD))
def test_constants_that_no_checkpoint_holds_are_noted_in_the_ledger(
    forward: Callable[[Any, Tensor], Tensor], shape: tuple[int, ...], layer: str, is_attribute: bool, bias: bool
) -> None:
    """Plain attributes and buffers that are not persistent: captures have both as the latter."""
    made = nn.Linear(4, 4, bias=bias) if layer == "linear" else nn.Conv2d(4, 4, 3, bias=bias)
    model, x = scaled(made, forward), ROWS if layer == "linear" else IMAGES
    added = 2 if shape and layer != "linear" else 0
    constant = (torch.rand(shape) + 0.5).reshape((*shape, *[1] * added))
    if is_attribute:
        model.k = constant
    else:
        model.register_buffer("k", constant, persistent=False)
    transformation = FoldScaleInLinear() if layer == "linear" else FoldScaleInConv()
    graph_module = transformation(capture(model, x), expect=1)
    torch.testing.assert_close(graph_module(x), model(x))
    assert not list(graph_module.buffers())
    state = model.state_dict()
    found = original_state_dict(pickle.loads(pickle.dumps(graph_module)))
    assert list(found) == list(state)
    for key, value in state.items():
        torch.testing.assert_close(found[key], value)
    other = {key: torch.randn_like(value) for key, value in state.items()}
    load_original_state_dict(graph_module, other)
    model.load_state_dict(other)
    torch.testing.assert_close(graph_module(x), model(x))


def test_constants_without_values_stay() -> None:
    with torch.device("meta"):
        model = linear(lambda m, x: m.layer(x) * m.d)()
    model._non_persistent_buffers_set.add("d")
    graph_module = FoldScaleInLinear()(capture(model, ROWS.to("meta")), expect=0)
    assert [code for _, code in refused(graph_module)] == ["not-a-parameter"]


def test_a_zero_in_a_constant_that_no_checkpoint_holds_stays() -> None:
    model = linear(lambda m, x: m.layer(x) * m.k)()
    model.k = torch.tensor([1.0, 0.0, 2.0])
    graph_module = FoldScaleInLinear()(capture(model, ROWS), expect=0)
    assert [code for _, code in refused(graph_module)] == ["out-of-range"]


def test_what_is_read_elsewhere_stays() -> None:
    def forward(m: Any, x: Tensor) -> Tensor:
        y = m.layer(x)
        z: Tensor = y * 2 + y
        return z

    folded = assert_rewrites(FoldScaleInLinear(), linear(forward)(), ROWS, count=0)
    assert [code for _, code in refused(folded)] == ["several-users"]


def test_what_is_no_site() -> None:
    models = [linear(lambda m, x: 2 / m.layer(x)), linear(lambda m, x: m.layer(x) + x.sum())]
    for make in models:
        graph_module = assert_rewrites(FoldScaleInLinear(), make(), ROWS, count=0)
        assert refused(graph_module) == []


def test_half_precision_is_rounded_once() -> None:
    model: Any = linear(lambda m, x: m.layer(x) * m.c)().half()
    graph_module = FoldScaleInLinear()(graph_of(model, "modules", ROWS.half()), expect=1)
    wanted = (model.layer.weight.double() * model.c.double()[:, None]).half()
    assert torch.equal(graph_module.get_parameter("layer_folded.weight"), wanted)


test_conformance = conformance_tests(
    FoldScaleInLinear(), models=[ModelCase("scaled linear", CASES["parameter and buffer"][1], ROWS)]
)
test_conformance_of_convolutions = conformance_tests(
    FoldScaleInConv(), models=[ModelCase("scaled convolution", CASES["channels"][1], IMAGES)]
)


def test_a_bias_that_no_number_gives_is_not_given_back() -> None:
    model = linear(lambda self, x: self.layer(x) + 2, bias=False)()
    folded = FoldScaleInLinear()(graph_of(model, "modules", ROWS), expect=1)
    assert torch.equal(original_state_dict(folded)["layer.weight"], model.get_parameter("layer.weight"))
    with torch.no_grad():
        folded.get_parameter("layer_folded.bias").add_(1)
    with pytest.raises(NotReversibleError, match=r"gives 2\.0 in place 0, where the folded bias is 3\.0"):
        original_state_dict(folded)
