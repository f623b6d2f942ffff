"""Plans convolve and pool as the single operators and torch do."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from thread_counts import threads
from torch import nn

from fxopt_cpu.layers.epilogue import Activation
from fxopt_cpu.library import isa
from fxopt_cpu.operators.conv import Window, pack_convolution
from fxopt_cpu.operators.plan import BLOCK, PlanBuilder, Value
from fxopt_cpu.regions.images import GroupNorm, normalize

pytestmark = pytest.mark.skipif(isa() is None, reason="the library was not built")


@pytest.mark.parametrize("seed", range(20))
def test_drawn_concatenations_and_picked_pixels(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    dim, sizes = seed % 4, [draw.randint(1, 5) for _ in range(3)] + [draw.choice((1, 5, 16, 40))]
    parts = []
    for _ in range(draw.randint(1, 3)):
        sizes[dim] = draw.choice((1, 3, 16, 33))
        parts.append(torch.randn(*sizes).permute(0, 3, 1, 2))
    rows, columns = ([draw.randrange(parts[0].shape[at]) for _ in range(draw.randint(1, 9))] for at in (2, 3))
    builder = PlanBuilder()
    # Inputs are made contiguous: a copy has the channels last.
    last = [builder.elementwise(builder.input(part).permute(0, 2, 3, 1)) for part in parts]
    builder.output(builder.concatenate(last, dim))
    builder.output(builder.pick(last[0].permute(0, 3, 1, 2), rows, columns))
    joined, picked = builder.build()(*parts)
    assert torch.equal(joined, torch.cat([part.permute(0, 2, 3, 1) for part in parts], dim))
    assert torch.equal(picked, parts[0][:, :, rows][:, :, :, columns])


def test_a_part_of_a_result_is_written_along_its_rows() -> None:
    x, builder = torch.randn(2, 3, 4, 4), PlanBuilder()
    value = builder.input(x)
    copy = builder.elementwise(value)
    builder.elementwise(value.narrow(0, 0, 1).permute(0, 1, 3, 2), into=copy.narrow(0, 0, 1))
    builder.output(copy)
    (found,) = builder.build()(x)
    assert torch.equal(found, torch.cat((x[:1].mT, x[1:])))


@pytest.mark.parametrize("seed", range(20))
def test_drawn_pools(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kernel, stride = (draw.randint(1, 4), draw.randint(1, 4)), (draw.randint(1, 3), draw.randint(1, 3))
    pad = (draw.randint(0, kernel[0] // 2), draw.randint(0, kernel[1] // 2))
    x = torch.randn(draw.randint(1, 2), draw.choice((1, 5, 16, 40)), draw.randint(4, 12), draw.randint(4, 12))
    if seed % 3 == 0:
        x[0, 0, 1, 1] = float("nan")
    largest, counts = seed % 2 == 0, draw.random() < 0.5
    builder = PlanBuilder()
    padding = (pad[0], pad[0], pad[1], pad[1])
    builder.output(
        builder.pool(
            builder.input(x),
            window=Window(kernel, stride=stride, padding=padding),
            largest=largest,
            counts_padding=counts,
        )
    )
    (found,) = builder.build()(x)
    if largest:
        expected = F.max_pool2d(x, kernel, stride, pad)
    else:
        expected = F.avg_pool2d(x, kernel, stride, pad, count_include_pad=counts)
    torch.testing.assert_close(found, expected, equal_nan=True)


@pytest.mark.parametrize("seed", range(12))
def test_drawn_group_norms(seed: int, instructions: str) -> None:
    """Other numbers of channels than a vector has, means far from zero, NaN, values far apart in memory."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    groups, sizes = draw.choice((1, 2, 3, 8, 32)), draw.choice(((1, 700), (3, 5), (40, 41)))
    channels, each = groups * draw.choice((1, 2, 5, 17)), draw.choice((1, 3))
    x = torch.randn(each, channels, *sizes) + draw.choice((0, 10, 1000))
    if seed % 3 == 0:
        x[0, 0, 0, 1] = float("nan" if seed % 2 else "inf")
    held: dict[str, Any] = {key: torch.randn(channels) for key in ("weight", "bias") if draw.random() < 0.7}
    builder = PlanBuilder()
    given: dict[str, Any] = {key: builder.weight(tensor) for key, tensor in held.items()}
    last = builder.elementwise(builder.input(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
    joined = builder.concatenate([each.permute(0, 2, 3, 1) for each in (last, last)], 3).permute(0, 3, 1, 2)
    silu = Activation("silu")
    builder.output(builder.group_norm(last, groups, **given, eps=1e-5, activation=silu))
    builder.output(builder.group_norm(joined.narrow(1, channels, channels), groups, **given, eps=1e-5))
    found, plain = builder.build()(x)
    expected = F.group_norm(x.double(), groups, **{key: tensor.double() for key, tensor in held.items()})
    for result, wanted in ((found, F.silu(expected)), (plain, expected)):
        torch.testing.assert_close(result, wanted.float(), rtol=1e-4, atol=3e-4, equal_nan=True)


@pytest.mark.parametrize("groups", [0, 3, -2])
def test_groups_that_do_not_fit_are_refused(groups: int) -> None:
    builder, norm = PlanBuilder(), GroupNorm(torch.fx.Graph().placeholder("x"), groups, 1e-5, {})
    with pytest.raises(ValueError, match="no step"):
        normalize(builder, builder.input(torch.empty(1, 8, 4, 4)), norm, {}, Activation())


def drawn_block(seed: int) -> tuple[list[nn.Conv2d], list[tuple[int, ...]], torch.Tensor]:
    """Layers of a block, the padding of each, and images."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    channels, wide = draw.choice((3, 8, 17)), draw.choice((24, 33, 48))
    size, step, gap = draw.choice((1, 3, 5)), draw.choice((1, 2, 3)), draw.choice((1, 1, 2))
    first = draw.choice((1, 3))
    # Of 3 x 3 taps, one step and many channels, a convolution is no part of a block.
    stride = 1 if first == 1 else draw.choice((1, 2)) if channels == 3 else 2
    expand = nn.Conv2d(channels, wide, first, stride=stride)
    deep = nn.Conv2d(wide, wide * draw.choice((1, 1, 2)), size, stride=step, dilation=gap, groups=wide)
    layers, padding = [expand, deep], [(first // 2,) * 4, tuple(draw.randint(0, size) for _ in range(4))]
    if draw.random() < 0.7:
        layers.append(nn.Conv2d(deep.out_channels, draw.choice((1, 20)), 1))
        padding.append((0,) * 4)
    height, width = draw.choice((12, 33, 90)), draw.choice((12, 40, 64))
    return layers, padding, torch.randn(draw.choice((1, 2)), channels, height, width)


@pytest.mark.skipif(isa() in (None, "portable"), reason="an order of sums")
@pytest.mark.parametrize("seed", range(30))
def test_blocks_have_the_bits_of_their_layers(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    layers, padding, x = drawn_block(seed)
    if seed % 3 == 0:
        x[0, 0, 3, 3] = torch.nan
    found, kinds, arenas = [], [], []
    for least in (1, 1 << 60):
        monkeypatch.setattr("fxopt_cpu.operators.plan.LEAST_OF_BLOCK", least)
        builder = PlanBuilder()
        value = first = builder.input(x)
        for place, (layer, sides) in enumerate(zip(layers, padding, strict=True)):
            assert layer.bias is not None
            value = builder.conv(
                value,
                pack_convolution(layer.weight.detach(), layer.groups),
                (layer.bias.detach(),),
                window=Window(layer.kernel_size, stride=layer.stride, padding=sides, dilation=layer.dilation),
                features=layer.out_channels,
                groups=layer.groups,
                activation=Activation("relu" if place < 2 else "none"),
                residual=first if value.shape == first.shape and place == 2 else None,
            )
        builder.output(value)
        plan = builder.build()
        kinds.append(any(BLOCK in step[:1] for step in builder._steps))
        arenas.append(plan.arena)
        for count in (1, 2, 3) if least == 1 else (1,):
            with threads(count):
                found.append(plan(x)[0])
    assert kinds == [True, False] and arenas[0] < arenas[1]
    for other in found[1:]:
        torch.testing.assert_close(other, found[0], rtol=0, atol=0, equal_nan=True)


@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("seed", range(12))
def test_copies_that_transpose_and_quotients_have_the_bits_of_torch(seed: int) -> None:
    draw = random.Random(seed)
    torch.manual_seed(seed)
    sizes = [
        draw.choice((1, 2)),
        draw.choice((1, 5, 16, 17, 33)),
        draw.choice((1, 15, 16, 40)),
        draw.choice((1, 7, 19)),
    ]
    x, other = torch.randn(*sizes), torch.randn(*sizes).round()  # some of it is zero
    x[..., 0, -1] = torch.nan
    builder = PlanBuilder()
    first, second = builder.input(x), builder.input(other)
    builder.output(builder.elementwise(first.permute(0, 2, 3, 1), activation=Activation("relu")))
    builder.output(builder.elementwise(first.permute(0, 3, 2, 1)))
    builder.output(builder.elementwise(first, second, "divide"))
    found = builder.build()(x, other)
    expected = [x.permute(0, 2, 3, 1).relu(), x.permute(0, 3, 2, 1), x / other]
    for one, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(one, wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("size", [(1, 15), (1, 16), (4, 7), (1, 50)])
@pytest.mark.usefixtures("instructions")
@pytest.mark.parametrize("channels", [8, 13, 16, 40])
def test_one_feature_is_that_of_torch(size: tuple[int, int], channels: int) -> None:
    torch.manual_seed(0)
    layer, x = nn.Conv2d(channels, 1, (1, 7), padding=(0, 3)), torch.randn(2, channels, *size)
    x[0, 0, 0, 3] = torch.nan
    assert layer.bias is not None
    builder = PlanBuilder()
    value = builder.conv(
        builder.input(x),
        pack_convolution(layer.weight.detach()),
        (layer.bias.detach(),),
        window=Window((1, 7), padding=(0, 0, 3, 3)),
        features=1,
        activation=Activation("tanh"),
    )
    builder.output(value)
    with torch.no_grad():
        torch.testing.assert_close(builder.build()(x)[0], layer(x).tanh(), rtol=1e-5, atol=1e-5, equal_nan=True)


@pytest.mark.parametrize("value", [None, float("nan"), 3e38])
def test_winograds_products_of_parts_of_wider_images(value: float | None) -> None:
    """They are written into a concatenation, and read from it, with pitches."""
    torch.manual_seed(0)
    x, builder = torch.randn(2, 9, 13, 21), PlanBuilder()
    if value is not None:
        x[0, 1, 4, 5] = value
    weights = [torch.randn(features, channels, 3, 3) / 9 for channels, features in ((9, 17), (9, 24), (41, 18))]
    packed = [pack_convolution(weight) for weight in weights]
    images = builder.input(x)

    def conv(value: Value, place: int) -> Value:
        return builder.conv(
            value, packed[place], window=Window((3, 3), padding=(1, 1, 1, 1)), features=len(weights[place])
        )

    builder.output(conv(builder.concatenate([conv(images, 0), conv(images, 1)], 1), 2))
    (found,) = builder.build()(x)
    joined = torch.cat([F.conv2d(x, weight, padding=1) for weight in weights[:2]], 1)
    expected = F.conv2d(joined, weights[2], padding=1)
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4, equal_nan=True)
