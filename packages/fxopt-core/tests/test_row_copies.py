"""Copies of large tensors: by several threads where that is just moving bytes, by torch everywhere else."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from fxopt_core import row_copies
from fxopt_core.row_copies import WORTHWHILE, copy_into


@pytest.fixture
def two_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(threads)


@pytest.fixture
def moved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The sizes of the pieces that were moved."""
    sizes: list[int] = []
    original = ctypes.memmove

    def noting(there: int, here: int, size: int) -> object:
        sizes.append(size)
        return original(there, here, size)

    monkeypatch.setattr(ctypes, "memmove", noting)
    return sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8], ids=str)
@pytest.mark.parametrize("extra", [0, 1, 4097])
def test_large_tensors_are_moved_piece_by_piece(
    two_threads: None, moved: list[int], dtype: torch.dtype, extra: int
) -> None:
    source = torch.arange(WORTHWHILE // dtype.itemsize + extra).to(dtype)
    whole = torch.full((len(source) + 2,), 7).to(dtype)
    copy_into(whole[1:-1], source)
    assert torch.equal(whole[1:-1], source)
    assert whole[0] == whole[-1] == 7  # and nothing beyond
    assert sum(moved) == source.nbytes
    assert max(moved) <= row_copies.PIECE


def test_bits_are_kept(two_threads: None, moved: list[int]) -> None:
    bits = torch.arange(WORTHWHILE // 2, dtype=torch.int32).to(torch.int16)
    source = bits.view(torch.bfloat16)  # with all kinds of values that are no numbers
    made = torch.empty_like(source)
    copy_into(made, source)
    assert torch.equal(made.view(torch.int16), bits)
    assert moved


def large(*shape: int) -> Tensor:
    return torch.arange(WORTHWHILE // 4, dtype=torch.float32).reshape(shape)


@pytest.mark.parametrize(
    ("target", "source"),
    [
        (torch.empty(3), torch.ones(3)),
        (torch.empty(2048, WORTHWHILE // 4 // 2048), large(-1, 2048).t()),
        (large(-1, 2048).t().clone(memory_format=torch.preserve_format), large(-1, 2048).t()),
        (torch.empty(WORTHWHILE // 4, dtype=torch.float64), large(-1)),
        (torch.empty(2, WORTHWHILE // 4), large(-1)),
        (torch.empty(WORTHWHILE // 8, dtype=torch.complex64), torch.view_as_complex(large(-1, 2)).conj()),
    ],
    ids=["small", "transposed", "neither in a row", "another dtype", "broadcast", "conjugated"],
)
def test_torch_copies_the_rest(two_threads: None, moved: list[int], target: Tensor, source: Tensor) -> None:
    copy_into(target, source)
    assert torch.equal(target, source.to(target.dtype).expand_as(target))
    assert not moved


def test_one_thread_leaves_it_to_torch(moved: list[int]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    source, made = large(-1), torch.empty(WORTHWHILE // 4)
    copy_into(made, source)
    torch.set_num_threads(threads)
    assert torch.equal(made, source)
    assert not moved


def test_tensors_without_memory_are_copied(two_threads: None, moved: list[int]) -> None:
    made = torch.empty(WORTHWHILE, device="meta")
    copy_into(made, torch.empty(WORTHWHILE, device="meta"))
    assert not moved


def test_an_error_in_a_thread_is_raised(two_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(there: int, here: int, size: int) -> object:
        raise MemoryError("no pages")

    monkeypatch.setattr(ctypes, "memmove", failing)
    with pytest.raises(MemoryError, match="no pages"):
        copy_into(torch.empty(WORTHWHILE), torch.empty(WORTHWHILE))
