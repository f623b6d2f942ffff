"""Copies of large tensors into memory that was just made, which is mostly waiting for the system to provide its pages.

torch divides a copy into equal parts, one for each of its threads, and waits for the slowest. Where other processes use
the same processors, one of these threads may have to wait for its turn longer than all the copying takes. Here, threads
take pieces one after the other, so that one which runs does the work of one which waits.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

PIECE = 1 << 22
"""Bytes that a thread copies at a time."""
WORTHWHILE = 2 * PIECE
"""Bytes from which on a copy is divided; starting threads takes as long as copying a twentieth of that."""


def copy_into(target: Tensor, source: Tensor) -> None:
    """Write the values of a tensor into one of the same shape that nothing else knows yet.

    >>> made = torch.empty(2)
    >>> copy_into(made, torch.ones(2))
    >>> made
    tensor([1., 1.])
    """
    threads = torch.get_num_threads()
    if threads < 2 or not _are_plain_memory(target, source):
        target.copy_(source)
        return
    size, there, here = source.nbytes, target.data_ptr(), source.data_ptr()

    def move(start: int) -> None:
        ctypes.memmove(there + start, here + start, min(PIECE, size - start))

    starts = range(0, size, PIECE)
    with ThreadPoolExecutor(min(threads, len(starts))) as pool:
        for _ in pool.map(move, starts):
            pass  # which raises what a thread raised


def _are_plain_memory(target: Tensor, source: Tensor) -> bool:
    """Return whether two tensors are equally many bytes in a row each, so many that several threads pay."""
    alike = (source.shape, source.dtype) == (target.shape, target.dtype)
    return alike and source.nbytes >= WORTHWHILE and _is_plain_memory(target) and _is_plain_memory(source)


def _is_plain_memory(tensor: Tensor) -> bool:
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.device.type == "cpu" and tensor.layout is torch.strided
    return plain and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
