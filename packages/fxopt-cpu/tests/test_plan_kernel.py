"""Plans: the same bits as the operators one by one, arenas whose parts do not overlap, and plans that are wrong."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from packed_bytes import pack_bytes
from thread_counts import threads
from torch import Tensor

from fxopt_cpu.layers.epilogue import CODES, NO_NORM, NONE, NORM_CODES, Activation, Norm
from fxopt_cpu.library import isa
from fxopt_cpu.operators.conv import Window, pack_convolution
from fxopt_cpu.operators.linear import pack, quantize
from fxopt_cpu.operators.plan import Plan, PlanBuilder, Value

pytestmark = pytest.mark.skipif(isa() is None, reason="the library was not built")
EPSILON = 1e-5
LAYER = Norm("layer", EPSILON)
ops = torch.ops.fxopt


class Layer:
    """One layer of an encoder, by operators one by one and as steps of a plan."""

    def __init__(self, width: int, hidden: int, heads: int, dtype: torch.dtype) -> None:
        self.width, self.heads, self.rounded = width, heads, dtype != torch.float32
        self.products = [
            self.packed(a, b, dtype) for a, b in ((3 * width, width), (width, width), (hidden, width), (width, hidden))
        ]
        self.norms = [(torch.randn(width), torch.randn(width)) for _ in range(2)]

    @staticmethod
    def packed(features: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor]:
        weight, bias = torch.randn(features, depth) * depth**-0.5, torch.randn(features)
        if dtype == torch.int8:
            return (*pack_bytes(*quantize(weight)), bias)
        return pack(weight.to(dtype)), None, None, bias

    def one_by_one(self, value: Tensor, mask: Tensor | None) -> Tensor:
        def linear(
            which: int, operand: Tensor, activation: Activation = NONE, residual: Any = None, norm: Norm = NO_NORM
        ) -> Tensor:
            bias, vectors = self.products[which][3], self.norms[which // 2] if norm.eps else (None, None)
            kinds = (CODES[activation.name], 0.0, 0.0, residual, NORM_CODES[norm.name], *vectors, EPSILON)
            result: Tensor = ops.linear(operand, *self.products[which], bias.numel(), *kinds, False, None)
            return result

        heads = self.heads
        found: Tensor = self.computed(
            linear, lambda merged: ops.attention_merged(merged, heads, heads, mask, 0.2, False, self.rounded), value
        )
        return found

    def steps(self, builder: PlanBuilder, value: Value, mask: Value | None) -> Value:
        def linear(which: int, operand: Value, norm: Norm = NO_NORM, **settings: Any) -> Value:
            panels, scale, sums, bias = self.products[which]
            vectors = (bias, scale, sums, None, *(self.norms[which // 2] if norm.eps else ()))
            return builder.linear(operand, panels, vectors, features=bias.numel(), norm=norm, **settings)

        heads = self.heads
        given: Any = {"scale": 0.2, "rounded": self.rounded}
        found: Value = self.computed(
            linear, lambda merged: builder.attention(*merged.split(heads, heads), mask=mask, **given), value
        )
        return found

    @staticmethod
    def computed(linear: Callable[..., Any], attention: Callable[[Any], Any], value: Any) -> Any:
        """The layer, by functions that compute its parts."""
        value = linear(1, attention(linear(0, value)), residual=value, norm=LAYER)
        return linear(3, linear(2, value, activation=Activation("gelu")), residual=value, norm=LAYER)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("batch, rows", [(1, 1), (1, 16), (3, 60)])
def test_an_encoder_gives_the_bits_of_its_operators(
    instructions: str, batch: int, rows: int, dtype: torch.dtype
) -> None:
    torch.manual_seed(0)
    words, places, layers = torch.randn(90, 48), torch.randn(64, 48), [Layer(48, 100, 3, dtype) for _ in range(3)]
    ids, mask = torch.randint(90, (batch, rows)), torch.rand(batch, 1, 1, rows) > 0.2
    order, weight = torch.arange(rows), torch.randn(48)
    builder = PlanBuilder()
    first, second = builder.input(ids), builder.input(mask)
    value = builder.embedding_norm(
        [first, builder.weight(order)],
        [builder.weight(words), builder.weight(places)],
        weight=builder.weight(weight),
        norm=LAYER,
    )
    expected = ops.embedding_norm([ids, order], [words, places], weight, None, EPSILON, 1)
    for layer in layers:
        value, expected = layer.steps(builder, value, second), layer.one_by_one(expected, mask)
    builder.output(value)
    builder.output(builder.elementwise(value.narrow(1, 0, 1), activation=Activation("tanh")))
    plan = builder.build()
    for _ in range(2):
        result, pooled = plan(ids, mask)
        assert torch.equal(result, expected)
        torch.testing.assert_close(pooled, expected[:, :1].tanh())
    with threads(2):
        assert torch.equal(plan(ids, mask)[0], expected)
    assert torch.equal(plan(ids.t().contiguous().t(), mask)[0], expected)


@pytest.mark.parametrize("rows, hidden", [(1, 128), (5, 384), (70, 2048), (300, 160), (9, 100)])
@pytest.mark.parametrize("read_twice, gated", [(False, False), (True, False), (False, True)])
def test_what_the_next_product_alone_reads_is_rounded_once(
    instructions: str, rows: int, hidden: int, read_twice: bool, gated: bool
) -> None:
    torch.manual_seed(0)
    first, second = (Layer.packed(*sizes, torch.bfloat16) for sizes in ((hidden, 64), (64, hidden)))
    if gated:
        first = (first[0].repeat(2, 1, 1, 1), None, None, first[3].repeat(2))
    value = torch.randn(rows, 64)
    value[rows // 2, :2] = torch.tensor([float("inf"), 3e38])
    settings = (CODES["gelu"], 0.0, 0.0, None, 0, None, None, EPSILON)
    between = ops.linear(value, *first, hidden, *settings, gated, None)
    expected = ops.linear(between, *second, 64, *settings, False, None)
    builder = PlanBuilder()
    operand = builder.input(value)
    given: Any = {"activation": Activation("gelu")}
    kept = builder.linear(operand, first[0], (first[3],), features=hidden, gated=gated, **given)
    operand = builder.linear(kept, second[0], (second[3],), features=64, **given)
    builder.output(operand)
    if read_twice:
        builder.output(builder.elementwise(kept))
    plan = builder.build()
    start = 6 + 3 * (2 + read_twice)  # of the first step, after two-dimensional inputs and outputs
    assert plan.steps[start : start + 3].tolist() == [1, 0, int(not read_twice)]
    results = plan(value)
    for result, wanted in zip(results, [expected, between], strict=False):
        torch.testing.assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)
    with threads(2):
        torch.testing.assert_close(plan(value)[0], expected, rtol=0, atol=0, equal_nan=True)


def test_a_hidden_layer_that_is_added_too_stays_in_float32(instructions: str) -> None:
    torch.manual_seed(0)
    value, settings = torch.randn(6, 64), (0, 0.0, 0.0)
    panels, _, _, bias = Layer.packed(64, 64, torch.bfloat16)
    hidden = ops.linear(value, panels, None, None, bias, 64, *settings, None, 0, None, None, EPSILON, False, None)
    expected = ops.linear(hidden, panels, None, None, bias, 64, *settings, hidden, 0, None, None, EPSILON, False, None)
    builder = PlanBuilder()
    between = builder.linear(builder.input(value), panels, (bias,), features=64)
    builder.output(builder.linear(between, panels, (bias,), features=64, residual=between.view(6, 64)))
    assert torch.equal(builder.build()(value)[0], expected)


@pytest.mark.parametrize("which", [1, 2])
def test_only_products_of_bfloat16_take_rounded_rows(which: int) -> None:
    builder = PlanBuilder()
    norm = (None,) * 4 + (torch.ones(64),)
    builder.output(
        builder.linear(builder.input(torch.ones(2, 64)), pack(torch.ones(64, 64)), norm, features=64, norm=LAYER)
    )
    plan = builder.build()
    plan.steps[6 + 3 * 2 + which] = 1
    with pytest.raises(RuntimeError, match="step 0 of the plan has rows that cannot be rounded"):
        plan(torch.ones(2, 64))


@pytest.fixture
def two_threads() -> Iterator[None]:
    with threads(2):
        yield


def test_threads_that_share_steps_change_nothing(instructions: str, two_threads: None) -> None:
    torch.manual_seed(0)
    layers = [Layer(128, 512, 4, dtype) for dtype in (torch.float32, torch.int8)]
    builder = PlanBuilder()
    value = builder.input(torch.empty(2, 40, 128))
    for layer in layers:
        value = layer.steps(builder, value, None)
    builder.output(value)
    plan = builder.build()
    inputs = [torch.randn(2, 40, 128) for _ in range(3)]
    exact = [layers[1].one_by_one(layers[0].one_by_one(each, None), None) for each in inputs]

    def often(which: int) -> bool:
        return all(torch.equal(plan(inputs[which])[0], exact[which]) for _ in range(20))

    assert often(0)
    with ThreadPoolExecutor(3) as callers:
        assert all(callers.map(often, range(3)))


def test_errors_of_steps_that_threads_share_come_out(two_threads: None) -> None:
    builder = PlanBuilder()
    value, ids = builder.input(torch.empty(200, 512)), builder.input(torch.empty(3, dtype=torch.int64))
    value = builder.linear(value, pack(torch.randn(512, 512)), features=512)
    rows = builder.embedding_norm([ids], [builder.weight(torch.randn(5, 512))])
    builder.output(builder.elementwise(value.narrow(0, 0, 3), rows, "add"))
    plan = builder.build()
    for _ in range(20):
        with pytest.raises(RuntimeError, match="index out of range in self: 5 in a table of 5 entries"):
            plan(torch.randn(200, 512), torch.tensor([0, 1, 5]))
    assert plan(torch.randn(200, 512), torch.tensor([0, 1, 4]))[0].shape == (3, 512)


def test_weights_of_a_call_are_read_anew() -> None:
    weight = torch.randn(4)
    builder = PlanBuilder()
    builder.output(builder.elementwise(builder.input(torch.empty(3, 4)), builder.weight(weight), "multiply"))
    plan = builder.build()
    value = torch.randn(3, 4)
    weight += 1
    assert torch.equal(plan(value)[0], value * weight)
    other = torch.randn(4)
    assert torch.equal(plan._replace(weights=[other])(value)[0], value * other)


def test_elementwise_steps_take_any_strides(instructions: str) -> None:
    torch.manual_seed(0)
    a, b = torch.randn(2, 5, 3, 7), torch.randn(5, 1, 7)
    builder = PlanBuilder()
    first, second = builder.input(a), builder.weight(b)
    for operation in ("add", "subtract", "multiply"):
        builder.output(builder.elementwise(first, second, operation, activation=Activation("relu")))
    builder.output(first.transpose(1, 3))
    builder.output(builder.elementwise(first.transpose(1, 2).narrow(3, 2, 4), activation=Activation("tanh")))
    builder.output(second.expand(6, 5, 1, 7))
    added, less, times, copied, tanh, repeated = builder.build()(a)
    for result, expected in ((added, a + b), (less, a - b), (times, a * b)):
        assert torch.equal(result, expected.relu())
    assert torch.equal(copied, a.transpose(1, 3)) and copied.is_contiguous()
    torch.testing.assert_close(tanh, a.transpose(1, 2)[..., 2:6].tanh())
    assert torch.equal(repeated, b.expand(6, 5, 1, 7))


def test_norms_attention_of_views_and_inputs_as_outputs(instructions: str) -> None:
    torch.manual_seed(0)
    query, both, bias = torch.randn(2, 9, 4 * 16), torch.randn(2, 30, 2 * 2 * 16), torch.randn(1, 4, 9, 30)
    builder = PlanBuilder()
    a, b, c = (builder.input(each) for each in (query, both, bias))
    heads = b.view(2, 30, 4, 16).transpose(1, 2)
    key, value = heads.narrow(1, 0, 2), heads.narrow(1, 2, 2)
    rows = builder.attention(a.view(2, 9, 4, 16).transpose(1, 2), key, value, mask=c, scale=0.3)
    total, normed = builder.elementwise(rows, a, "add"), builder.norm(rows, a, norm=Norm("rms", EPSILON))
    last = builder.norm(total.narrow(1, 3, 1), norm=LAYER)
    for each in (a, total, normed, last):
        builder.output(each)
    plan = builder.build()
    outputs = plan(query, both, bias)
    split = both.view(2, 30, 4, 16).transpose(1, 2)
    expected = ops.attention(query.view(2, 9, 4, 16).transpose(1, 2), split[:, :2], split[:, 2:], bias, 0.3, False)
    expected_total, expected_normed = expected + query, ops.norm(expected, query, None, None, EPSILON, 2)
    expected_last = ops.norm(expected_total[:, 3:4], None, None, None, EPSILON, 1)
    for result, exact in zip(outputs, (query, expected_total, expected_normed, expected_last), strict=True):
        assert torch.equal(result, exact)
    assert outputs[0].data_ptr() != query.data_ptr()


def test_rows_of_several_strides_are_copied() -> None:
    builder, x = PlanBuilder(), torch.randn(2, 3, 4)
    value = builder.input(x)
    builder.output(builder.norm(value.transpose(0, 1), value.transpose(0, 1), norm=LAYER))
    builder.output(builder.linear(value.transpose(1, 2), pack(torch.eye(3)), features=3))
    normed, same = builder.build()(x)
    assert torch.equal(normed, ops.norm(2 * x.transpose(0, 1), None, None, None, EPSILON, 1))
    assert torch.equal(same, x.transpose(1, 2))


def test_an_arena_larger_than_what_threads_keep() -> None:
    builder = PlanBuilder()
    value = builder.input(torch.empty(1500, 3000))
    for _ in range(3):
        value = builder.elementwise(value, value, "add")
    builder.output(builder.elementwise(value))
    plan = builder.build()
    ones = torch.ones(1500, 3000)
    assert plan.arena == 2 * 1500 * 3000 * 4  # of three sums, two live at a time
    assert plan(ones)[0].eq(8).all()


def encoder(dtype: torch.dtype) -> tuple[Plan, list[Tensor]]:
    torch.manual_seed(0)
    ids, mask = torch.randint(20, (2, 5)), torch.zeros(2, 1, 1, 5)
    builder = PlanBuilder()
    first, second = builder.input(ids), builder.input(mask)
    value = builder.embedding_norm([first], [builder.weight(torch.randn(20, 32))], norm=LAYER)
    value = Layer(32, 64, 2, dtype).steps(builder, value, second)
    builder.output(builder.norm(value, norm=LAYER))
    return builder.build(), [ids, mask]


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 100 else pytest.mark.nightly) for seed in range(300)]
)
def test_changed_plans_raise_or_stay_within_their_memory(seed: int) -> None:
    """Under AddressSanitizer, this is what shows that nothing is read out of bounds."""
    plan, inputs = encoder(torch.bfloat16 if seed % 2 else torch.float32)
    draw = random.Random(seed)
    steps = plan.steps.clone()
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.randrange(len(steps))
        steps[at] = draw.choice(
            [-1, 0, 1, 2, 7, 33, 1000, 2**20, 2**40, 2**62, -(2**63), int(steps[at]) + 1, int(steps[at]) * 2]
        )
    with contextlib.suppress(RuntimeError, MemoryError):
        ops.run(inputs, plan.weights, steps)


def test_a_plan_that_rounds_rows_takes_no_rounding() -> None:
    builder, (ints, factors, totals) = PlanBuilder(), pack_bytes(*quantize(torch.randn(16, 8)))
    sums, rounding = torch.cat([totals, torch.zeros_like(totals)]), torch.tensor([[1.0], [0.0]]).repeat(1, 8)
    value = builder.input(torch.empty(2, 8))
    builder.output(builder.linear(value, ints, (None, factors, sums, rounding), features=16))
    plan = builder.build()
    at = 12 + 13  # behind the header and two shapes, and the numbers of the step before it
    assert plan.steps[at] == 1 and plan(torch.zeros(2, 8))[0].eq(0).all()
    plan.steps[at] = 0
    with pytest.raises(RuntimeError, match="step 0 of the plan rounds rows, and has an operand that rounds them"):
        plan(torch.zeros(2, 8))


def test_builders_refuse_what_no_step_can_take() -> None:
    builder = PlanBuilder()
    heads, six = builder.input(torch.empty(1, 2, 3, 4)), builder.input(torch.empty(2, 3, 2, 3, 2, 3))
    images, panels = builder.input(torch.empty(1, 8, 4, 4)), pack_convolution(torch.randn(8, 8, 3, 3))
    wide = builder.input(torch.empty(1, 8, 1, 5000))
    turned, part = heads.transpose(2, 3), builder.input(torch.empty(2, 6, 4, 4)).narrow(1, 0, 3)
    square = builder.elementwise(builder.input(torch.empty(2, 3, 4, 4)))
    calls: tuple[Callable[[], Value], ...] = (
        lambda: builder.attention(heads, heads.narrow(3, 0, 2), heads, scale=1.0),
        lambda: builder.attention(turned, turned, turned, scale=1.0),
        lambda: builder.elementwise(six.transpose(0, 5).transpose(1, 3)),
        lambda: builder.elementwise(part, into=square.transpose(2, 3)),
        lambda: builder.pool(images, window=Window((7, 7)), largest=True),
        lambda: builder.pool(wide, window=Window((1, 5000)), largest=False),
        lambda: builder.conv(images, panels, window=Window((3, 3)), features=8, residual=images),
    )
    for call in calls:
        with pytest.raises(ValueError, match="no step"):
            call()


def test_results_that_lie_in_each_other_are_not_computed_without_end() -> None:
    builder = PlanBuilder()
    value = builder.input(torch.empty(8, 16))
    builder.output(builder.elementwise(value, value, "add"))
    plan = builder.build()
    sizes = 12 + 5  # behind the header, two shapes, and the step's kind, operation and activation
    assert plan.steps[sizes : sizes + 4].tolist() == [1, 1, 1, 128]
    plan.steps[sizes] = 2**32
    plan.steps[[sizes + 4, sizes + 8, sizes + 12]] = 0  # the strides of that dimension
    with pytest.raises(RuntimeError, match="step 0 of the plan has results that overlap"):
        plan(torch.ones(8, 16))


def test_keys_that_lie_in_each_other_are_not_read_without_end() -> None:
    builder = PlanBuilder()
    query, key, value = (builder.input(torch.empty(1, 2, 3, 8)) for _ in range(3))
    builder.output(builder.attention(query, key, value, scale=1.0))
    plan = builder.build()
    sizes = 6 + 3 * 5 + 4  # behind the header and four shapes
    steps = plan.steps.clone()
    assert steps[sizes : sizes + 8].tolist() == [2, 1, 2, 2, 3, 3, 8, 8]  # the kind; batch, heads, rows and their sizes
    steps[sizes + 5] = 2**38
    strides = sizes + 11  # of queries, keys and values: batch, head and row
    steps[[strides + 5, strides + 8]] = 0
    inputs = [torch.ones(1, 2, 3, 8)] * 3
    with pytest.raises(RuntimeError, match="step 0 of the plan has keys that overlap"):
        ops.run(inputs, plan.weights, steps)
