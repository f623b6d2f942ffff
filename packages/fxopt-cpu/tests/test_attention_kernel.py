"""`fxopt::attention` against its reference in float64, eager attention in what is not finite, and row by row."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from thread_counts import threads
from torch import Tensor

from fxopt_cpu.library import isa
from fxopt_cpu.operators.attention import ATTENTION, ATTENTION_MERGED, split

INFINITY = math.inf
X = torch.ones(1, 1, 49, 256)
needs_library = pytest.mark.skipif(isa() is None, reason="the library was not built")


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, *flags: bool) -> Tensor:
    causal, rounded = (*flags, False, False)[:2]
    result: Tensor = torch.ops.fxopt.attention(query, key, value, mask, query.shape[-1] ** -0.5, causal, rounded)
    return result


def eager(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None, causal: bool = False) -> Tensor:
    return F.scaled_dot_product_attention(query, key, value, mask, is_causal=causal).transpose(1, 2).flatten(2)


def close(result: Tensor, expected: Tensor, rounded: bool = False) -> None:
    atol, rtol = (2e-2, 1e-2) if rounded and isa() == "amx" else (2e-6, 1e-5)
    size = max(1.0, finite_size(expected))
    torch.testing.assert_close(result.double(), expected.double(), atol=atol * size, rtol=rtol, equal_nan=True)


def finite_size(value: Tensor) -> float:
    finite = value[value.isfinite()]
    return finite.abs().max().item() if finite.numel() else 0.0


def masks(batch: int, heads: int, queries: int, keys: int) -> Iterator[tuple[str, Tensor | None]]:
    yield "none", None
    padding = torch.zeros(batch, 1, 1, keys)
    padding[..., keys // 2 + 1 :] = -INFINITY
    yield "padding", padding
    yield "keys", torch.rand(batch, 1, 1, keys) > 0.3
    yield "queries", torch.rand(batch, 1, queries, 1) > 0.3
    yield "bias", torch.randn(1, heads, queries, keys)
    yield "strided", torch.randn(batch, heads, keys, queries).transpose(2, 3)
    yield "boolean", torch.rand(batch, 1, queries, keys) > 0.8  # some rows attend no key at all
    yield "two dimensions", torch.randn(queries, keys)
    yield "expanded", torch.randn(batch, 1, queries, keys + 3)[..., :keys].expand(batch, heads, queries, keys)


def drawn(seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Query, key and value of drawn shapes and strides."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    batch, kv_heads = draw.choice([1, 1, 2, 3]), draw.choice([1, 2, 3])
    heads = kv_heads * draw.choice([1, 1, 2, 4])
    queries = draw.choice([0, 1, 2, 3, 4, 5, 7, 11, 16, 17, 31, 32, 33, 50, 65, 130])
    keys = draw.choice([queries, queries, 1, 2, 5, 16, 17, 100, 127, 128, 129, 200, 300])
    size = draw.choice([16, 32, 32, 64, 64, 80, 96, 128, 256, 1, 7, 20, 33])
    value_size = draw.choice([size, size, 16, 24])
    query = torch.randn(batch, queries, heads, size + 3)[..., :size].transpose(1, 2)
    key = torch.randn(batch, keys, kv_heads, size).transpose(1, 2)
    value = torch.randn(kv_heads, batch, keys, value_size).transpose(0, 1)
    if seed % 4 == 0:  # a last stride that is not 1
        key = torch.randn(batch, kv_heads, size, keys).transpose(2, 3)
    return query, key, value


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 16 else pytest.mark.nightly) for seed in range(40)]
)
def test_drawn_shapes_strides_and_masks_agree_with_float64(instructions: str, seed: int) -> None:
    query, key, value = drawn(seed)
    batch, heads, queries, keys = *query.shape[:3], key.shape[2]
    for _, mask in masks(batch, heads, queries, keys):
        for causal in (False, True):
            exact = mask if mask is None or mask.dtype == torch.bool else mask.double()
            scale = query.shape[3] ** -0.5
            expected = ATTENTION.reference(query.double(), key.double(), value.double(), exact, scale, causal)
            for rounded in (False, True):
                result = attention(query, key, value, mask, causal, rounded)
                assert result.shape == expected.shape and result.is_contiguous()
                close(result, expected, rounded)


@pytest.mark.parametrize("queries, keys", [(1, 4096), (3, 2050), (33, 1500), (300, 700)])
def test_long_rows_in_blocks(instructions: str, queries: int, keys: int) -> None:
    torch.manual_seed(0)
    query, key, value = torch.randn(1, 2, queries, 32), 3 * torch.randn(1, 2, keys, 32), torch.randn(1, 2, keys, 32)
    key[:, :, keys // 2] += 8 * query[:, :, 0]  # the maximum comes in a late block
    for rounded in (False, True):
        result = attention(query, key, value, None, False, rounded)
        close(result, eager(query.double(), key.double(), value.double()), rounded)


@pytest.mark.parametrize("queries", [1, 3, 20, 40, 60])
def test_what_is_not_finite_comes_out_as_in_eager(instructions: str, queries: int) -> None:
    torch.manual_seed(0)
    rounded = queries == 60
    query, key, value = (torch.randn(1, 2, rows, 32) for rows in (queries, 140, 140))
    allowed = torch.rand(queries, 140) > 0.5
    allowed[0] = False
    lowest = torch.zeros(queries, 140)
    lowest[queries // 2] = torch.finfo(torch.float32).min
    nan_mask = torch.zeros(queries, 140)
    nan_mask[0, 3] = math.nan
    infinite_mask = torch.zeros(queries, 140)
    infinite_mask[0, 130] = INFINITY
    for mask in (
        None,
        allowed,
        torch.zeros(queries, 140).masked_fill(~allowed, -INFINITY),
        lowest,
        nan_mask,
        infinite_mask,
    ):
        for place in ("nothing", "query", "key", "value"):
            for special in (math.nan, INFINITY, -INFINITY, 1e30, 1e-42, -0.0):
                operands: dict[str, Any] = {"query": query.clone(), "key": key.clone(), "value": value.clone()}
                if place != "nothing":
                    operands[place][0, 1, -1, 5] = special
                result = attention(operands["query"], operands["key"], operands["value"], mask, False, rounded)
                close(result, eager(**operands, mask=mask), rounded)


def test_rows_that_attend_no_key_are_zero(instructions: str) -> None:
    query, key, value = torch.randn(1, 1, 3, 16), torch.randn(1, 1, 5, 16), torch.randn(1, 1, 5, 16)
    assert attention(query, key, value, torch.zeros(1, 1, 3, 5, dtype=torch.bool)).eq(0).all()
    assert attention(query, key[:, :, :0], value[:, :, :0]).eq(0).all()
    assert attention(torch.randn(1, 1, 20, 16), key[:, :, :0], value[:, :, :0]).eq(0).all()
    assert attention(torch.randn(1, 1, 60, 16), key[:, :, :0], value[:, :, :0], None, False, True).eq(0).all()


@pytest.mark.parametrize("heads, kv_heads, size", [(12, 12, 32), (8, 2, 20), (4, 1, 64)])
def test_merged_products_are_split_within(instructions: str, heads: int, kv_heads: int, size: int) -> None:
    torch.manual_seed(0)
    for rows in (1, 2, 16, 37, 150):
        whole = torch.randn(2, rows, (heads + 2 * kv_heads) * size + 5)
        for merged in (whole[..., :-5], whole[..., :-5].contiguous()):
            for mask in (None, torch.rand(2, 1, 1, rows) > 0.2):
                result = torch.ops.fxopt.attention_merged(merged, heads, kv_heads, mask, 0.2, False)
                query, key, value = split(merged, heads, kv_heads)
                assert torch.equal(result, torch.ops.fxopt.attention(query, key, value, mask, 0.2, False))
                close(result, ATTENTION_MERGED.reference(merged.double(), heads, kv_heads, mask, 0.2, False))


@needs_library
@pytest.mark.parametrize("queries", [1, 2, 17, 33, 70, 270])
def test_a_row_is_the_same_whatever_the_others_are(instructions: str, queries: int) -> None:
    torch.manual_seed(0)
    rounded = queries == 270  # 16 heads take other pieces than the four of one batch
    query, key, value = (torch.randn(4, 4, rows, 32) for rows in (queries, 150, 150))
    mask = torch.randn(4, 1, queries, 150)
    whole = attention(query, key, value, mask, False, rounded)
    for one in range(4):
        part = slice(one, one + 1)
        assert torch.equal(attention(query[part], key[part], value[part], mask[part], False, rounded), whole[part])
    # Fewer are another regime.
    least = 49 if rounded else {"avx2": 3, "avxvnni": 3, "portable": 2, "none": 1}.get(instructions, 5)
    for some in (slice(0, least), slice(-least, None)) if queries > least else ():
        assert torch.equal(attention(query[:, :, some], key, value, mask[:, :, some], False, rounded), whole[:, some])


@needs_library
def test_rounding_needs_little_memory_and_reads_no_values_of_later_blocks(instructions: str) -> None:
    long = torch.randn(1, 1, 1, 256).expand(1, 1, 2**17 + 1, 256)
    assert torch.equal(attention(X, long, long, None, False, True), attention(X, long, long))
    value = torch.randn(1, 1, 120, 256)
    value[:, :, 100:] = INFINITY
    assert attention(torch.randn(1, 1, 120, 256), value.clamp(-1, 1), value, None, True, True)[:, :96].isfinite().all()


@needs_library
def test_threads_change_nothing(instructions: str) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 6, rows, 64) for rows in (130, 300, 300))
    for rounded in (False, True):
        one = attention(query, key, value, None, False, rounded)
        with threads(2):
            assert torch.equal(attention(query, key, value, None, False, rounded), one)


GOOD = {"query": (2, 4, 5, 16), "key": (2, 2, 7, 16), "value": (2, 2, 7, 24)}


@needs_library
@pytest.mark.parametrize(
    "change, message",
    [
        ({"query": torch.zeros(2, 4, 5, 16, dtype=torch.float64)}, "query is Double, expected Float"),
        ({"query": torch.zeros(4, 5, 16)}, r"query has shape \(4, 5, 16\), expected \(batch, heads, rows, size\)"),
        ({"key": torch.zeros(2, 3, 7, 16)}, "key has 3 heads and query 4, expected a divisor"),
        ({"key": torch.zeros(2, 2, 7, 15)}, r"key has shape \(2, 2, 7, 15\), expected \(2, 2, 7, 16\)"),
        ({"value": torch.zeros(2, 2, 6, 24)}, r"value has shape \(2, 2, 6, 24\), expected \(2, 2, 7, 24\)"),
        ({"mask": torch.zeros(5, 6)}, r"mask has shape \(5, 6\), expected one that broadcasts to \(2, 4, 5, 7\)"),
        ({"mask": torch.zeros(5, 7, dtype=torch.int64)}, "mask is Long, expected Float"),
    ],
)
def test_bad_operands_are_named(change: dict[str, Tensor], message: str) -> None:
    operands: dict[str, Any] = {name: torch.zeros(*shape) for name, shape in GOOD.items()} | change
    with pytest.raises(RuntimeError, match=message):
        attention(**operands)


@needs_library
def test_bad_merged_products_are_named() -> None:
    with pytest.raises(RuntimeError, match=r"merged has shape \(1, 2, 30\), expected \(batch, rows, 8 \* head size\)"):
        torch.ops.fxopt.attention_merged(torch.zeros(1, 2, 30), 4, 2, None, 1.0, False)
    with pytest.raises(RuntimeError, match="heads is 4 and kv_heads 0"):
        torch.ops.fxopt.attention_merged(torch.zeros(1, 2, 32), 4, 0, None, 1.0, False)
    wraps = (2**64 + 2) // 3  # three of them are 2
    with pytest.raises(RuntimeError, match=f"heads is {wraps} and kv_heads {wraps}, expected .* at most {2**40}"):
        torch.ops.fxopt.attention_merged(torch.zeros(1, 4, 6), wraps, wraps, None, 1.0, False)
