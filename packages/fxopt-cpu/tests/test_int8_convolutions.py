"""Convolutions in int8: the operator, `QuantizedConv2d` and `1d`, and `FuseConvolutions(weights="int8")`."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from low_precision_models import Net, layers, sqnr
from packed_bytes import pack_bytes
from site_passes import Computes
from thread_counts import threads
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_checkpoints import load_original_state_dict
from fxopt_core import FxoptError
from fxopt_cpu import FuseConvolutions, PlanRegions, QuantizedConv2d, calibrated, isa
from fxopt_cpu.library import limit_isa
from fxopt_cpu.operators.conv import CONV, Window, pack_convolution
from fxopt_cpu.operators.linear import ACTIVATIONS, quantize, shifted_sums
from fxopt_cpu.operators.plan import PlanBuilder
from fxopt_cpu.passes import low_precision
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import FORMS, graph_of, refusals, refused

pytestmark = pytest.mark.skipif(isa() is None, reason="the library was not built")
SMALL = FuseConvolutions(weights="int8", min_weights=1)
STATIC = FuseConvolutions(weights="int8", min_weights=1, activations="static")
X = torch.randn(2, 16, 12, 11)
NAN, INF = float("nan"), float("inf")


# --- The operator


@pytest.fixture
def instruction_set(instructions: str) -> str:
    return instructions


def packed(weight: Tensor, rounding: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    integers, scale = quantize(weight)
    panels, scales, sums = pack_bytes(integers.permute(0, 2, 3, 1).flatten(1), scale)
    assert torch.equal(panels, pack_convolution(integers))
    if rounding is not None:
        sums = torch.cat([sums, shifted_sums(panels, rounding[1].repeat(weight[0, 0].numel()))])
    return panels, scales, sums


def drawn(seed: int) -> list[Any]:
    """Operands of a call; some images have NaN or infinity, some channels factors and shifts of their own."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    channels, features = draw.choice((1, 3, 8, 16, 20, 33, 64, 130)), draw.choice((1, 5, 16, 40, 64, 100))
    kernel, stride = draw.choice(((1, 1), (3, 3), (5, 2), (7, 7), (1, 4))), (draw.choice((1, 2)), draw.choice((1, 3)))
    dilation, padding = (draw.choice((1, 2)), 1), [draw.randint(0, 3) for _ in range(4)]
    sizes = [dilation[i] * (kernel[i] - 1) + 1 + draw.randint(0, 20) for i in range(2)]
    x = torch.randn(draw.choice((0, 1, 2, 3)), channels, *sizes)
    if len(x) and seed % 5 == 0:
        x[0, 0, sizes[0] // 2, sizes[1] // 2] = NAN
    if len(x) and seed % 7 == 0:
        x[-1, -1, 0, 0] = INF
    weight = torch.randn(features, channels, *kernel) / (channels * kernel[0] * kernel[1]) ** 0.5
    scaled = torch.stack((torch.rand(channels) * 20 + 10, torch.randint(-100, 100, (channels,)).float()))
    rounding = scaled if seed % 2 else None
    panels, scale, sums = packed(weight, rounding)
    bias, activation = torch.randn(features) if seed % 3 else None, draw.randrange(len(ACTIVATIONS))
    numbers = [features, kernel, stride, padding, dilation, 1, activation, 0.1, 0.9]
    shape = CONV.reference(x, panels, bias, *numbers, None).shape
    residual = torch.randn(shape) if seed % 4 else None
    return [x, panels, bias, *numbers, residual, scale, sums, rounding]


@pytest.mark.parametrize("seed", range(40))
def test_the_kernel_computes_what_the_reference_does(seed: int, instruction_set: str) -> None:
    given = drawn(seed)
    found, wanted = torch.ops.fxopt.conv(*given), CONV.reference(*given)
    assert found.shape == wanted.shape
    # A number between two integers may be rounded to either.
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=0.03, equal_nan=True)
    if not len(found) or wanted.isfinite().sum() < 9:
        return
    difference = (found - wanted)[wanted.isfinite()]
    assert difference.square().mean() < 1e-5 * wanted[wanted.isfinite()].square().mean() + 1e-12


@pytest.mark.parametrize(("channels", "kernel"), [(1, (8, 16)), (2, (8, 8)), (4, (4, 8)), (3, (6, 7)), (5, (5, 5))])
def test_windows_that_just_fill_a_row(channels: int, kernel: tuple[int, int], instruction_set: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, channels, kernel[0] + 30, kernel[1] + 20), torch.randn(16, channels, *kernel)
    panels, scale, sums = packed(weight, None)
    given = [x, panels, None, 16, kernel, (1, 1), [0] * 4, (1, 1), 1, 0, 0.0, 0.0, None, scale, sums]
    found, wanted = torch.ops.fxopt.conv(*given), CONV.reference(*given)
    assert (found - wanted).norm() < 1e-3 * wanted.norm()


@pytest.mark.parametrize("size", [1e-38, 1e-20, 1e30, 3e38])
def test_images_of_any_size(size: float, instruction_set: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.rand(1, 16, 6, 6) * size, torch.rand(16, 16, 1, 1) / 16
    panels, scale, sums = packed(weight, None)
    found = torch.ops.fxopt.conv(x, panels, None, 16, *[(1, 1)] * 2, [0] * 4, (1, 1), 1, 0, 0.0, 0.0, None, scale, sums)
    torch.testing.assert_close(found, F.conv2d(x, weight), rtol=0.03, atol=1e-30)


def test_threads_and_other_images_change_no_bit() -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, 48, 40, 41), torch.randn(70, 48, 3, 3)
    panels, scale, sums = packed(weight, None)

    def call(images: Tensor) -> Tensor:
        numbers = (70, (3, 3), (1, 1), (1, 1, 1, 1), (1, 1), 1, 0, 0.0, 0.0)
        result: Tensor = torch.ops.fxopt.conv(images, panels, None, *numbers, None, scale, sums)
        return result

    results = []
    for count in (1, 2, 3):
        with threads(count):
            results.append(call(x))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])
    assert torch.equal(results[0][1:2], call(x[1:2]))
    x[0] = 1e6
    assert torch.equal(results[0][1:], call(x)[1:])


@pytest.mark.parametrize("static", [False, True])
def test_plans_read_and_write_parts_of_wider_images(static: bool) -> None:
    """The input is some channels of a concatenation, the result some of another; no block takes integers in."""
    torch.manual_seed(0)
    x, wide = torch.randn(2, 16, 9, 8), torch.randn(2, 9, 8, 24)
    weights = [torch.randn(32, 16, 1, 1) / 4, torch.randn(16, 32, 1, 1) / 6]
    deep = torch.randn(32, 1, 3, 3)
    rounding = torch.stack((torch.full((16,), 30.0), torch.full((16,), 4.0))) if static else None
    roundings = [rounding, None if rounding is None else rounding.repeat(1, 2)]
    builder = PlanBuilder()
    first, second = builder.input(x), builder.input(wide)
    both = builder.concatenate([builder.elementwise(first.permute(0, 2, 3, 1)), second], 3)
    value, expected = both.narrow(3, 0, 16).permute(0, 3, 1, 2), x
    for weight, its in zip(weights, roundings, strict=True):
        panels, scale, sums = packed(weight, its)
        value = builder.conv(value, panels, (None, scale, sums, its), window=Window((1, 1)), features=len(weight))
        numbers = (len(weight), (1, 1), (1, 1), [0] * 4, (1, 1), 1, 0, 0.0, 0.0, None)
        expected = torch.ops.fxopt.conv(expected, panels, None, *numbers, scale, sums, its)
        if len(weight) == 32:
            panels = pack_convolution(deep, 32)
            value = builder.conv(value, panels, window=Window((3, 3), padding=(1, 1, 1, 1)), features=32, groups=32)
            expected = F.conv2d(expected, deep, None, 1, 1, 1, 32)
    last = builder.concatenate([second, value.permute(0, 2, 3, 1)], 3)
    builder.output(builder.elementwise(last))
    (found,) = builder.build()(x, wide)
    torch.testing.assert_close(found, torch.cat([wide, expected.permute(0, 2, 3, 1)], 3), rtol=1e-3, atol=0.05)


# --- Which layers


@pytest.fixture(autouse=True)
def every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrite also where float32 is faster."""
    monkeypatch.setattr(low_precision, "SLOW_IN_INT8", ())


@pytest.mark.skipif(isa() == "portable", reason="the processor has no other instructions")
def test_processors_without_vnni_stay_with_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    before = str(isa())
    try:
        limit_isa("avx2")
        graph_module = SMALL(torch.fx.symbolic_trace(Net().eval()), expect=0)
    finally:
        limit_isa(before)
    assert {refusal.reason for refusal in refusals(graph_module)} == {"no-operators"}
    assert "(VNNI)" in refusals(graph_module)[0].message


def test_what_cannot_be_rounded_is_refused() -> None:
    model = nn.Sequential(
        nn.Conv2d(16, 16, 3, groups=4), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1).double(),
        nn.Conv2d(8, 16, 1), nn.Conv2d(16, 16, 1), nn.Conv2d(16, 1, 1),
    ).eval()  # fmt: skip
    model[1].train()
    next(model[2].parameters()).data[0, 0, 0, 0] = NAN
    model[5].register_forward_hook(lambda *_: None)
    model[6].weight, model[6].bias = nn.Parameter(torch.zeros(0, 16, 1, 1)), nn.Parameter(torch.zeros(0))
    graph_module = SMALL(torch.fx.symbolic_trace(model), expect=0)
    assert dict(refused(graph_module)) == {
        "0": "not-in-int8", "1": "training", "2": "out-of-range", "3": "unsupported-dtype", "4": "too-small",
        "5": "hooks", "6": "unsupported-call",
    }  # fmt: skip
    assert all(f"`{refusal.site}`" in refusal.message for refusal in refusals(graph_module))


# --- Ranges from data


@pytest.mark.parametrize("form", FORMS)
def test_static_ranges_are_those_of_the_calls(form: Form) -> None:
    torch.manual_seed(0)
    model = Net().eval()
    x = torch.randn(8, 16, 12, 11) * torch.logspace(-1, 1, 16).view(-1, 1, 1) + torch.randn(16, 1, 1)
    with calibrated(graph_of(model, form, x), [x, (x.flip(0),)]) as graph_module:
        graph_module = STATIC(graph_module)
    assert len(layers(graph_module)) == 4 and all(hasattr(layer, "rounding") for layer in layers(graph_module))
    assert sqnr(graph_module, model, x) > 30
    with torch.no_grad():
        assert graph_module(torch.full_like(x, 1e6)).abs().max() < 1e3  # what lies beyond is cut off
    with pytest.raises(FxoptError, match="ranges that were found with the former weights"):
        load_original_state_dict(graph_module, model.state_dict())


def test_ranges_of_images_without_a_batch_are_those_of_channels() -> None:
    model = nn.Sequential(nn.Conv2d(16, 32, 3, padding=1)).eval()
    x = torch.randn(4, 16, 16, 16) * torch.logspace(-2, 2, 16).view(16, 1, 1)
    with calibrated(torch.fx.symbolic_trace(model), x.unbind()) as graph_module:
        graph_module = STATIC(graph_module)
    assert sqnr(graph_module, model, x) > 35


@torch.no_grad()
def test_other_buffers_and_missing_ones_do_not_stop_a_call() -> None:
    (layer,) = layers(SMALL(torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(16, 16, 1)).eval())))
    expected = layer(X)
    layer.register_buffer("calls", torch.zeros(1))
    assert torch.equal(layer(X), expected)
    layer.register_buffer("rounding", None)
    torch.testing.assert_close(layer(X), expected, rtol=0.05, atol=0.05)


def test_a_file_cannot_set_groups() -> None:
    layer = QuantizedConv2d(16, 16, (1, 1))
    layer.groups = 2
    with pytest.raises(ValueError, match="groups is 2, expected 1"):
        layer.check_attributes()


# --- One dimension


def _sounds(m: Any, x: Tensor) -> Any:
    y = m.one(F.gelu(m.first(x)))
    return F.gelu(m.last(F.relu(m.two(y) + y)))


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_layers_over_one_dimension(kind: str, form: Form) -> None:
    """As of wav2vec 2.0, in small. Those that cannot be rounded are packed after them, so that a plan holds all."""
    torch.manual_seed(0)
    layers = {"first": nn.Conv1d(1, 16, 10, stride=5), "last": nn.Conv1d(32, 32, 7, padding="same", groups=4)}
    layers |= {"one": nn.Conv1d(16, 32, 3, stride=2), "two": nn.Conv1d(32, 32, 3, padding=2, dilation=2)}
    model, x = Computes(_sounds, **layers).eval(), torch.randn(3, 1, 2000) * torch.tensor([1.0, 10, 0.1]).view(3, 1, 1)
    with calibrated(graph_of(model, form, x), [x]) as graph_module:
        rounded = FuseConvolutions(weights="int8", min_weights=1, activations=kind)(graph_module, expect=2)
    assert dict(refused(rounded)) == {"first": "too-small", "last": "not-in-int8"}
    assert sqnr(FuseConvolutions()(rounded, expect=2), model, x) > 28
    found, planned = rounded(x), PlanRegions()(rounded)
    for _ in range(2):
        torch.testing.assert_close(planned(x), found)
    first, x[1, 0, 500] = planned(x)[0], NAN
    assert torch.equal(planned(x)[0], first)  # no input changes another's bits
    assert torch.equal(planned(x).isnan(), model(x).isnan())
    if kind == "dynamic":
        load_original_state_dict(planned, {key: each * 2 for key, each in model.state_dict().items()})
        assert not torch.allclose(planned(x)[0], found[0])


# --- What reaches a layer


@pytest.mark.parametrize("value", [INF, -INF, NAN])
@torch.no_grad()
def test_a_value_that_is_not_finite_reaches_what_reads_it_alone(value: float) -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1)).eval()
    graph_module, x = SMALL(torch.fx.symbolic_trace(model)), X.clone()
    x[1, 2, 5, 5] = value
    found, before = graph_module(x), graph_module(X)
    assert torch.equal(found[0], before[0])
    assert torch.equal(found.isfinite(), model(x).isfinite())


@pytest.mark.parametrize("count", [1, 2, 3])
@torch.no_grad()
def test_windows_with_nan_in_a_plan_of_large_layers(count: int) -> None:
    """They are pieces of a step, which cannot be shared among threads once more."""
    model = nn.Sequential(nn.Conv2d(512, 512, 3, padding=1), nn.ReLU(), nn.Conv2d(512, 512, 1)).eval()
    x = torch.randn(2, 512, 9, 9)
    x[0, 3, 4, 4] = NAN
    graph_module = PlanRegions()(SMALL(graph_of(model, "export", x)))
    with threads(count):
        expected = model(x)
        for _ in range(5):
            found = graph_module(x)
            assert torch.equal(found.isnan(), expected.isnan())
            assert (found[1] - expected[1]).norm() < 0.05 * expected[1].norm()


def test_gradients_reach_the_input() -> None:
    x = X.clone().requires_grad_()
    SMALL(graph_of(Net().eval(), "modules", X))(x).sum().backward()
    assert x.grad is not None and x.grad.abs().max() > 0


@torch.no_grad()
def test_other_dtypes_go_to_torch() -> None:
    graph_module = SMALL(torch.fx.symbolic_trace(Net().eval()))
    expected = graph_module(X)
    assert isinstance(graph_module, GraphModule)
    for layer in layers(graph_module):
        nn.Module.double(layer)
        assert layer.scale.dtype is torch.float32
    torch.testing.assert_close(graph_module(X.double()).float(), expected, rtol=0.05, atol=0.05)
