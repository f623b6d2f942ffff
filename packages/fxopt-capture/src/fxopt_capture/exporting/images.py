"""Heights and widths of images among the sizes of the inputs, and the same inputs with larger images."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import torch
from torch import nn
from torch.utils import _pytree as pytree

Place = tuple[int, int]  # input, dimension

#: The smallest height or width that may vary: the next after those that torch.export distinguishes.
SMALLEST = 3
_LARGEST_STEP = 64


def image_sizes(model: nn.Module, inputs: Mapping[str, object]) -> list[Place]:
    """Return heights and widths among the sizes of the inputs, each as the index of a flat input and a dimension.

    An image is a four-dimensional tensor of floats with as many channels as a two-dimensional convolution of the model
    takes. Sizes below 3 are left out.

    >>> image_sizes(nn.Conv2d(3, 4, 3), {"scale": torch.ones(1), "image": torch.ones(2, 3, 8, 1)})
    [(1, 2)]
    """
    channels = {module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)}
    return [
        (place, dim)
        for place, leaf in enumerate(pytree.tree_leaves(dict(inputs)))
        if isinstance(leaf, torch.Tensor) and leaf.dim() == 4 and leaf.is_floating_point() and leaf.size(1) in channels
        for dim in (2, 3)
        if leaf.size(dim) >= SMALLEST
    ]


def enlarged(inputs: Mapping[str, object], places: Collection[Place]) -> dict[str, object]:
    """Return inputs with heights larger by one step and widths larger by two; a step divides the size.

    >>> enlarged({"image": torch.ones(2, 3, 224, 20)}, [(0, 2), (0, 3)])["image"].shape
    torch.Size([2, 3, 256, 28])
    """
    leaves, spec = pytree.tree_flatten(dict(inputs))
    for place, dim in places:
        size = leaves[place].size(dim)
        # `size & -size` is the largest power of two that divides the size: patches and strides that are powers of two
        # and divide the size also divide the larger one.
        more = min(size & -size, _LARGEST_STEP) * (dim - 1)
        leaves[place] = torch.cat([leaves[place], *[leaves[place]] * -(-more // size)], dim).narrow(dim, 0, size + more)
    found: dict[str, object] = pytree.tree_unflatten(leaves, spec)
    return found
