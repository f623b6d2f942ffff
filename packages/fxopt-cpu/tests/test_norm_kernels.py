"""`fxopt::norm` and `fxopt::embedding_norm` against their references in float64, and row by row."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fxopt_cpu.layers.norms import EmbeddingNorm
from fxopt_cpu.library import isa
from fxopt_cpu.operators.norms import EMBEDDING_NORM, NORM

needs_library = pytest.mark.skipif(isa() is None, reason="the library was not built")
EPSILON = 1e-6


def close(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result.double(), expected.double(), atol=3e-6, rtol=1e-5, equal_nan=True)


def double(*operands: Tensor | None) -> list[Tensor | None]:
    return [None if operand is None else operand.double() for operand in operands]


@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("size", [1, 3, 8, 15, 16, 17, 63, 64, 65, 100, 384, 1000])
def test_drawn_rows_agree_with_float64(instructions: str, size: int, kind: int) -> None:
    torch.manual_seed(size)
    weight, bias = torch.randn(size), torch.randn(size)
    for shape in ((), (0,), (1,), (300,), (2, 3, 5)):
        value = torch.randn(*shape, size + 2)[..., :size] * 3 + 1
        residual = torch.randn(size, *shape).movedim(0, -1)  # a last stride that is not 1
        for w, b in ((weight, bias), (weight, None), (None, bias), (None, None)):
            exact_w, exact_b = double(w, b)
            if kind == 2 or size > 1:  # the layer norm of one element divides rounding by epsilon
                exact = NORM.reference(value.double(), None, exact_w, exact_b, EPSILON, kind)
                close(torch.ops.fxopt.norm(value, None, w, b, EPSILON, kind), exact)
                exact = NORM.reference(value.double(), residual.double(), exact_w, exact_b, EPSILON, kind)
                close(torch.ops.fxopt.norm(value, residual, w, b, EPSILON, kind), exact)


@pytest.mark.parametrize("kind", [1, 2])
@pytest.mark.parametrize("special", [math.nan, math.inf, -math.inf, 1e-42, -0.0, 1e18])
def test_what_is_not_finite_comes_out_as_in_eager(instructions: str, special: float, kind: int) -> None:
    torch.manual_seed(0)
    value = torch.randn(4, 37)
    value[1, 5] = value[2, 36] = special
    result = torch.ops.fxopt.norm(value, None, None, None, EPSILON, kind)
    close(result, NORM.reference(value, None, None, None, EPSILON, kind))
    assert result[[0, 3]].isfinite().all()


@needs_library
@pytest.mark.parametrize("kind", [1, 2])
def test_a_row_is_the_same_whatever_the_others_are(instructions: str, kind: int) -> None:
    torch.manual_seed(0)
    value, residual = torch.randn(70, 100), torch.randn(70, 100)
    whole = torch.ops.fxopt.norm(value, residual, None, None, EPSILON, kind)
    for row in (0, 33, 69):
        part = slice(row, row + 1)
        assert torch.equal(torch.ops.fxopt.norm(value[part], residual[part], None, None, EPSILON, kind), whole[part])


@pytest.mark.parametrize("kind", [0, 1, 2])
@pytest.mark.parametrize("size", [5, 16, 100, 384])
def test_embeddings_are_summed_and_normed(instructions: str, size: int, kind: int) -> None:
    torch.manual_seed(0)
    tables = [torch.randn(50, size), torch.randn(size, 2).t(), torch.randn(20, size + 3)[:, :size]]
    weight, bias = torch.randn(size), torch.randn(size)
    for shape in ((3, 9), (1, 1), (0, 9), (2, 20)):
        words, types = torch.randint(50, shape[::-1]).t(), torch.randint(2, shape)
        places = torch.arange(shape[1])
        for ids, some in (
            ([words], tables[:1]),
            ([words, types, places], tables),
            ([words, types, places[None]], tables),
        ):
            exact = [table.double() for table in some]
            norm = (weight.double(), bias.double()) if kind else (None, None)
            expected = EMBEDDING_NORM.reference(ids, exact, *norm, EPSILON, kind)
            use = (weight, bias) if kind else (None, None)
            result = torch.ops.fxopt.embedding_norm(ids, some, *use, EPSILON, kind)
            assert result.shape == (*shape, size) and result.is_contiguous()
            close(result, expected)


def test_ids_out_of_range_raise_as_in_torch(instructions: str) -> None:
    for bad in (-1, 7, 2**62):
        with pytest.raises((IndexError, RuntimeError), match="index out of range in self"):
            torch.ops.fxopt.embedding_norm([torch.tensor([[0, bad]])], [torch.zeros(7, 4)], None, None, EPSILON, 1)


@needs_library
def test_bad_operands_are_named() -> None:
    value, ids, table = torch.zeros(2, 8), torch.zeros(2, dtype=torch.int64), torch.zeros(5, 8)
    norm, embedding = torch.ops.fxopt.norm, torch.ops.fxopt.embedding_norm
    calls: tuple[tuple[Callable[[], Tensor], str], ...] = (
        (lambda: norm(value.double(), None, None, None, EPSILON, 1), "input is Double, expected Float"),
        (lambda: norm(value, value[:1], None, None, EPSILON, 1), r"residual has shape \(1, 8\), expected \(2, 8\)"),
        (lambda: norm(value, None, None, torch.zeros(8).half(), EPSILON, 1), "bias is Half, expected Float"),
        (lambda: norm(value, None, None, None, EPSILON, 3), r"kind is 3, expected 1 \(layer norm\) or 2 \(RMS norm\)"),
        (lambda: norm(torch.tensor(1.0), None, None, None, EPSILON, 1), "input has 0 dimensions"),
        (lambda: embedding([ids], [], None, None, EPSILON, 1), "0 tables and 1 ids, expected as many, 1 to 8"),
        (
            lambda: embedding([ids, ids], [table, table[:, :4]], None, None, EPSILON, 1),
            "expected .entries, size. with one size",
        ),
        (
            lambda: embedding([ids[:1].expand(2**31, 2**31)] * 4, [table] * 4, None, None, EPSILON, 1),
            "have a product that is too large",
        ),
        (lambda: embedding([ids, torch.zeros(3).long()], [table, table], None, None, EPSILON, 1), "do not broadcast"),
    )
    for call, message in calls:
        with pytest.raises(RuntimeError, match=message):
            call()


def test_a_padding_row_is_one_of_its_table() -> None:
    EmbeddingNorm((4, 2), 8, padding=(-1, 1)).check_attributes()
    with pytest.raises(ValueError, match=r"tables have \(4, 2\) rows, and their padding is \(-1, 2\)"):
        EmbeddingNorm((4, 2), 8, padding=(-1, 2)).check_attributes()
