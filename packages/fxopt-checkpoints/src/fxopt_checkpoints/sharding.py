"""Tensors sharded over several processes (DTensor): the local part of a region, and writing a region."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeGuard

import torch
from torch import Tensor

from fxopt_checkpoints.tensor_map import Pieces, region
from fxopt_core.errors import CheckpointError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


def is_sharded(value: object) -> TypeGuard[DTensor]:
    """Return whether a value is a DTensor: sharded by FSDP2 or by tensor parallelism, or replicated.

    >>> is_sharded(torch.zeros(2))
    False
    """
    module = sys.modules.get("torch.distributed.tensor")  # loading it takes a second, and makes no tensor a DTensor
    return module is not None and isinstance(value, module.DTensor)


@dataclass(frozen=True)
class LocalRegion:
    """The part of a region that this process holds."""

    values: Tensor  # a view of this process's memory
    offsets: tuple[int, ...]  # where it begins in the region

    def of(self, values: Tensor) -> Tensor:
        """Return the same part of a tensor that covers the whole region."""
        for dim, (offset, size) in enumerate(zip(self.offsets, self.values.shape, strict=True)):
            values = values.narrow(dim, offset, size)
        return values


def local_region(name: str, whole: DTensor, pieces: Pieces = ()) -> LocalRegion:
    """Return the part of a region that this process holds; it may be empty.

    Args:
        name: the tensor's name in the error.
        whole: the sharded tensor.
        pieces: the region, the outermost piece first.

    Raises:
        CheckpointError: The tensor is not sharded by ``Shard`` and ``Replicate``.
    """
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    odd = [placement for placement in whole.placements if type(placement) not in (Shard, Replicate)]
    if odd:
        raise CheckpointError(
            f"`{name}` is sharded by {odd[0]}, expected Shard and Replicate: its rows on this process are not one "
            "block. Shard it over one dimension of the mesh"
        )
    shape, offset = compute_local_shape_and_global_offset(whole.shape, whole.device_mesh, whole.placements)
    dims, begin, size = _box(tuple(whole.shape), pieces)
    local = whole.to_local().detach()
    # In each dimension, the region and the rows of this process are two intervals, whose intersection begins at `low`
    # and ends at `room`.
    low = [max(start, first) for start, first in zip(begin, offset)]  # noqa: B905  # no offset outside of the mesh
    room = [min(start + n, first + m) for start, n, first, m in zip(begin, size, offset, shape)]  # noqa: B905
    lengths = [high - start for high, start in zip(room, low, strict=True)]
    if whole.device_mesh.get_coordinate() is None or min(lengths, default=1) <= 0:
        return LocalRegion(local.new_empty([0] * len(dims)), (0,) * len(dims))
    for dim, (start, length) in enumerate(zip(low, lengths, strict=True)):
        local = local.narrow(dim, start - offset[dim], length)
    # What a piece squeezes has one element by now: as the last dimension, reshape drops it and returns a view.
    dropped = [dim for dim in range(local.dim()) if dim not in dims]
    local = local.permute(*dims, *dropped).reshape([lengths[dim] for dim in dims]) if pieces else local
    return LocalRegion(local, tuple(low[dim] - begin[dim] for dim in dims))


def _box(shape: tuple[int, ...], pieces: Pieces) -> tuple[list[int], list[int], list[int]]:
    """Return a region as a box of the whole tensor: its dimensions, and start and size in each of the whole's.

    >>> from fxopt_rewrite.journal.edits import Piece
    >>> _box((8, 4), (Piece("a", ((0, 2, 4),)), Piece("b", ((0, 1, 2),), transposed=True)))
    ([1, 0], [3, 0], [2, 4])
    """
    # dims[i] is the dimension of the whole tensor that the region has as its i-th one.
    dims, begin, size = [*range(len(shape))], [0] * len(shape), [*shape]
    for piece in pieces:
        for dim, start, length in piece.slices:
            begin[dims[dim]] += start
            size[dims[dim]] = length
        if piece.squeeze is not None:
            del dims[piece.squeeze]
        if piece.transposed:
            dims.reverse()
    return dims, begin, size


def write(name: str, target: Tensor, pieces: Pieces, values: Tensor | float) -> None:
    """Write values into a region of a tensor; in a sharded one, into the local part of the region.

    Args:
        name: the name of ``target`` in errors.
        target: the tensor.
        pieces: the region, the outermost piece first.
        values: as large as the region, or a number that fills it. Sharded values are gathered unless the target is
            sharded and the region is all of it.
    """
    with torch.no_grad():
        if is_sharded(target):
            if is_sharded(values) and not pieces:
                target.copy_(values)
                return
            here = local_region(name, target, pieces)
            place, values = here.values, values if isinstance(values, float) else here.of(_whole(values))
        else:
            place, values = region(target.detach(), pieces), values if isinstance(values, float) else _whole(values)
        place.fill_(values) if isinstance(values, float) else place.copy_(values)


def _whole(values: Tensor) -> Tensor:
    return values.full_tensor() if is_sharded(values) else values


def holds(condition: Tensor) -> bool:
    """Return whether a condition of one element is true; all processes get the same answer."""
    return bool(_whole(condition))


def holds_constant(name: str, whole: Tensor, pieces: Pieces, value: float) -> bool:
    """Return whether a region has one value everywhere, with the same answer on all processes and without gathering."""
    if not is_sharded(whole):
        return bool((region(whole, pieces) == value).all())
    from torch.distributed import ReduceOp, all_reduce

    # The minimum of zeros and ones over the mesh is one if all processes have a one.
    found = (local_region(name, whole, pieces).values == value).all().to(torch.int32)
    for dim in range(whole.device_mesh.ndim):
        all_reduce(found, ReduceOp.MIN, group=whole.device_mesh.get_group(dim))
    return bool(found)
