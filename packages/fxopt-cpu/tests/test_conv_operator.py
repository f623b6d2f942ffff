"""`fxopt::conv` computes what torch does in float64, for every instruction set of this processor."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from packed_bytes import pack_bytes
from thread_counts import threads
from torch import Tensor

from fxopt_cpu.operators.conv import CONV, pack_convolution
from fxopt_cpu.operators.linear import ACTIVATIONS, activate, quantize


@pytest.fixture(autouse=True)
def instruction_set(instructions: str) -> str:
    if instructions == "none":
        pytest.skip("the library was not built")
    return instructions


Case = tuple[Tensor, Tensor, Tensor | None, tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def drawn(seed: int) -> Case:
    """Input, weight, bias, stride, padding, dilation and groups."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    images, groups = draw.choice((0, 1, 1, 2, 3)), draw.choice((1, 1, 2, 3, 8, 24, 33))
    kernel = draw.choice(((1, 1), (3, 3), (3, 3), (5, 5), (1, 3), (4, 2), (7, 7)))
    stride, dilation = (draw.choice((1, 1, 2, 3)), draw.choice((1, 2))), (draw.choice((1, 1, 2)), 1)
    padding = tuple(draw.randint(0, 3) for _ in range(4))
    sizes = [dilation[i] * (kernel[i] - 1) + 1 + draw.randint(0, 18) for i in range(2)]
    channels = draw.choice((1, 2, 3, 7, 8, 16, 24, 33, 70) if groups == 1 else (1, 1, 2, 4, 17))  # of a group
    features = groups * draw.choice((1, 5, 16, 30, 64, 100, 130) if groups == 1 else (1, 1, 2, 4, 16, 20, 50))
    weight = torch.randn(features, channels, *kernel)
    bias = torch.randn(features) if draw.random() < 0.7 else None
    return torch.randn(images, channels * groups, *sizes), weight, bias, stride, padding, dilation, groups


def computed(case: Case, activation: str = "none", residual: Tensor | None = None) -> Tensor:
    x, weight, bias, stride, padding, dilation, groups = case
    panels = pack_convolution(weight, groups)
    options = (len(weight), weight.shape[2:], stride, padding, dilation, groups)
    result: Tensor = torch.ops.fxopt.conv(x, panels, bias, *options, ACTIVATIONS.index(activation), 0.1, 0.9, residual)
    return result


def expected(case: Case, activation: str = "none", residual: Tensor | None = None) -> Tensor:
    x, weight, bias, stride, (top, bottom, left, right), dilation, groups = case
    padded = F.pad(x.double(), (left, right, top, bottom))
    value = F.conv2d(padded, weight.double(), None if bias is None else bias.double(), stride, 0, dilation, groups)
    value = value if residual is None else value + residual
    return activate(value, ACTIVATIONS.index(activation), 0.1, 0.9)


@pytest.mark.parametrize("seed", range(40))
def test_drawn_convolutions(seed: int) -> None:
    case = drawn(seed)
    shape = expected(case).shape
    residual = torch.randn(shape) if seed % 2 else None
    activation = ACTIVATIONS[seed % len(ACTIVATIONS)]
    found = computed(case, activation, residual)
    torch.testing.assert_close(found.double(), expected(case, activation, residual), rtol=1e-5, atol=1e-4)
    assert found.is_contiguous(memory_format=torch.channels_last) or not found.numel()


@pytest.mark.parametrize("channels", [31, 64, 100, 203])
@pytest.mark.parametrize("value", [0.5, float("nan")])
@pytest.mark.parametrize("repeats", [1, 2, 3, 8])
def test_depthwise_edges_of_many_channels(channels: int, value: float, repeats: int) -> None:
    """Tiles of one and two pixels take the most channels at once; several features may read each channel."""
    torch.manual_seed(channels)
    x = torch.randn(2, channels, 7, 9)
    x[0, channels - 1, 0, 0] = value
    weight, bias = torch.randn(channels * repeats, 1, 5, 5), torch.randn(channels * repeats)
    case = x, weight, bias, (1, 1), (2, 2, 2, 2), (1, 1), channels
    torch.testing.assert_close(
        computed(case, "hardswish").double(), expected(case, "hardswish"), rtol=1e-5, atol=1e-4, equal_nan=True
    )


@pytest.mark.parametrize("value", [None, float("nan"), float("inf"), 3e38, -1e38])
@pytest.mark.parametrize("seed", range(6))
def test_winograds_products(seed: int, value: float | None) -> None:
    """Layers of 3 x 3 taps over images of many pixels; numbers that have no differences are multiplied tap by tap."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    channels, features = draw.choice((8, 17, 64, 130)), draw.choice((16, 40, 64, 100))
    x = torch.randn(draw.choice((1, 2)), channels, draw.randint(10, 21), draw.randint(12, 41))
    weight, padding = torch.randn(features, channels, 3, 3) / 8, tuple(draw.randint(0, 3) for _ in range(4))
    case: Case = (x, weight, torch.randn(features) if seed % 2 else None, (1, 1), padding, (1, 1), 1)
    residual = torch.randn(expected(case).shape) if seed % 3 else None
    if value is None:
        found = computed(case, "relu", residual).double()
        torch.testing.assert_close(found, expected(case, "relu", residual), rtol=1e-5, atol=2e-5)
        return
    x[0, 1, 4, 5] = x[-1, 2, -1, -1] = value
    top, bottom, left, right = padding
    eager = F.conv2d(F.pad(x, (left, right, top, bottom)), weight, case[2])
    wanted = eager if residual is None else eager + residual
    # The error is relative to the largest product of a window, which may be a thousand times the result.
    torch.testing.assert_close(computed(case, "none", residual), wanted, rtol=1e-3, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("count", [1, 2])
def test_each_number_of_threads_gives_the_same_bits(count: int) -> None:
    torch.manual_seed(0)
    large: Case = (torch.randn(2, 24, 40, 41), torch.randn(70, 24, 3, 3), None, (1, 1), (1, 1, 1, 1), (1, 1), 1)
    deep: Case = (torch.randn(2, 200, 40, 41), torch.randn(200, 1, 3, 3), None, (1, 1), (1, 1, 1, 1), (1, 1), 200)
    with threads(count):
        results = [computed(case) for case in (large, deep)]
    for case, found in zip((large, deep), results, strict=True):
        torch.testing.assert_close(found.double(), expected(case), rtol=1e-5, atol=1e-4)
        assert torch.equal(found[:1], computed((case[0][:1], *case[1:]))), "an image depends on the others"


@pytest.mark.parametrize(
    ("kernel", "width"), [((3, 3), 90), ((5, 4), 90), ((1, 3), 90), ((40, 2), 90), ((40, 2), 900), ((3, 3), 6000)]
)
@pytest.mark.parametrize("stride", [1, 2])
@pytest.mark.parametrize("last", [False, True])
def test_few_channels_in_long_rows(kernel: tuple[int, int], width: int, stride: int, last: bool) -> None:
    """Rows are copied as far as there is room: several, one, or a part of one."""
    torch.manual_seed(0)
    x, weight = torch.randn(2, 3, kernel[0] + 3, width), torch.randn(17, 3, *kernel)
    x = x.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
    case: Case = (x, weight, torch.randn(17), (stride, stride), (1, 0, 2, 1), (1, 1), 1)
    torch.testing.assert_close(computed(case).double(), expected(case), rtol=1e-5, atol=1e-4)


def test_strided_and_contiguous_inputs_give_the_same() -> None:
    case = drawn(3)
    x = case[0] if case[0].numel() else torch.randn(2, *case[0].shape[1:])
    wide = torch.randn(2 * x.shape[0], *x.shape[1:])
    wide[::2] = x
    for other in (
        x.contiguous(memory_format=torch.channels_last),
        wide[::2],
        x.transpose(2, 3).contiguous().transpose(2, 3),
    ):
        assert torch.equal(computed((other, *case[1:])), computed((x, *case[1:])))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("groups", [1, 4, 16])
@pytest.mark.parametrize("activation", ["none", "relu", "hardtanh", "hardswish", "silu"])
def test_nan_and_infinity_come_out_as_in_eager(value: float, groups: int, activation: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(1, 16, 9, 9), torch.randn(16, 16 // groups, 3, 3)
    x[0, 3, 4, 4] = value
    case: Case = (x, weight, None, (1, 1), (1, 1, 1, 1), (1, 1), groups)
    eager = F.conv2d(x, weight, padding=1, groups=groups)
    wanted = activate(eager, ACTIVATIONS.index(activation), 0.1, 0.9)
    torch.testing.assert_close(computed(case, activation), wanted, equal_nan=True, rtol=1e-4, atol=1e-4)


INT8 = dict(zip(("panels", "scale", "sums"), pack_bytes(*quantize(torch.randn(8, 72))), strict=True))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input": torch.randn(1, 8, 9, 9).double()}, "input is Double, expected Float"),
        ({"input": torch.randn(8, 9, 9)}, "input has 3 dimensions, expected 4"),
        ({"panels": torch.randn(1, 72, 8)}, r"panels have shape \(1, 72, 8\), expected \(1, 72, 16\)"),
        ({"padding": (1, 1)}, r"padding is \(1, 1\), expected 4 numbers"),
        ({"padding": (0, 0, 0, 0), "dilation": (5, 5)}, "padded less than the kernel"),
        ({"groups": 3}, "groups is 3 for 8 channels and 8 features, expected a number that divides both"),
        ({"activation": 99}, "activation is 99, expected 0 to 13"),
        ({"residual": torch.randn(1, 8, 9, 8)}, r"residual has shape \(1, 8, 9, 8\), expected \(1, 8, 9, 9\)"),
        ({"input": torch.randn(1, 0, 9, 9)}, r"input has shape \(1, 0, 9, 9\), expected at least one channel"),
        ({"features": 2**62}, f"features is {2**62}, expected 1 to {2**40}"),
        ({"padding": (2**31 - 1, 0, 2**31 - 1, 0)}, "have a product that is too large"),
        ({"stride": (0, 1)}, r"stride is \(0, 1\), expected 2 numbers of at least 1"),
        ({**INT8, "scale": None}, "panels of int8 need scale and sums, one group"),
        ({**INT8, "groups": 2}, "panels of int8 need scale and sums, one group"),
        ({**INT8, "panels": torch.zeros(1, 36, 16, 2).char()}, r"expected \(1, 18, 16, 4\), contiguous"),
        ({"scale": torch.zeros(16)}, "panels of float32 take no scale, sums and rounding"),
        ({**INT8, "rounding": torch.zeros(2, 7)}, r"sums has shape \(16\), expected 32 elements"),
    ],
)
def test_wrong_operands_are_named(change: dict[str, object], message: str) -> None:
    given: dict[str, object] = {
        "input": torch.randn(1, 8, 9, 9), "panels": pack_convolution(torch.randn(8, 8, 3, 3)), "bias": None,
        "features": 8, "kernel": (3, 3), "stride": (1, 1), "padding": (1, 1, 1, 1), "dilation": (1, 1), "groups": 1,
        "activation": 0, "alpha": 0.0, "beta": 0.0, "residual": None, "scale": None, "sums": None, "rounding": None,
    }  # fmt: skip
    with pytest.raises(RuntimeError, match=f"fxopt::conv: .*{message}"):
        torch.ops.fxopt.conv(*(given | change).values())


def test_the_reference_and_the_fake_agree_with_the_kernel() -> None:
    for seed in range(8):
        x, weight, bias, stride, padding, dilation, groups = drawn(seed)
        panels = pack_convolution(weight, groups)
        settings = len(weight), list(weight.shape[2:]), stride, padding, dilation, groups
        given = (x, panels, bias, *settings, 1, 0.0, 0.0, None)
        found = torch.ops.fxopt.conv(*given)
        torch.testing.assert_close(found, CONV.reference(*given), rtol=1e-4, atol=1e-4)
        fake = torch.ops.fxopt.conv(*(each.to("meta") if isinstance(each, torch.Tensor) else each for each in given))
        assert (fake.shape, fake.dtype) == (found.shape, found.dtype)
        assert fake.stride() == found.stride() or not found.numel()
