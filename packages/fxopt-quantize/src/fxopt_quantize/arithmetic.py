"""The arithmetic of quantized weights: one symmetric scale for each output channel.

``weight[i, j]`` is about ``scale[i] * integer[i, j]``, with ``scale[i]`` the largest magnitude in row ``i`` divided by
127, and integers from -127 to 127: no zero point, so that zero is exact. Key maps name these functions.
"""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from fxopt_core import NotReversibleError

LARGEST = 127


def quantized(weight: Tensor, *, transposed: bool = False) -> tuple[Tensor, Tensor]:
    """Return the integers (out, in) of a weight, and the scales (out,) in float32.

    Args:
        weight: (out, in).
        transposed: whether it is (in, out) instead.

    >>> integers, scale = quantized(torch.tensor([[1.0, -2.0], [0.0, 0.0]]))
    >>> integers.tolist(), round(scale[0].item() * 127, 4), scale[1].item()
    ([[64, -127], [0, 0]], 2.0, 1.0)
    """
    matrix = weight.detach().t() if transposed else weight.detach()
    largest = matrix.abs().amax(1).to(torch.float32) if matrix.shape[1] else matrix.new_zeros(len(matrix)).float()
    scale = torch.where(largest > 0, largest / LARGEST, 1.0).clamp_min(torch.finfo(torch.float32).tiny)
    integers = (matrix.to(torch.float32) / scale.unsqueeze(1)).round_().clamp_(-LARGEST, LARGEST)
    return integers.to(torch.int8).contiguous(), scale


def dequantized(integers: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the weight that integers and scales stand for, (out, in).

    >>> dequantized(torch.tensor([[64, -127]], dtype=torch.int8), torch.tensor([0.5]), torch.float32)
    tensor([[ 32.0000, -63.5000]])
    """
    return (integers.to(torch.float32) * scale.unsqueeze(1)).to(dtype)


def lost(*tensors: Tensor, **settings: object) -> NoReturn:
    """Refuse to go back: the passes of this family name it as their ``restore``."""
    raise NotReversibleError(
        "it was rounded, and the original values are lost. Keep the original checkpoint, save "
        "graph_module.state_dict(), or run the pass with keep_originals=True, where it has that option"
    )


def rounded(weight: Tensor, bias: Tensor | None = None, *, transposed: bool = False) -> tuple[Tensor, Tensor | None]:
    """Return weight and bias in bfloat16, a weight that is stored as (in, out) as (out, in).

    >>> rounded(torch.tensor([1.0 + 2**-9]))
    (tensor([1.], dtype=torch.bfloat16), None)
    """
    made = weight.detach().bfloat16()
    return made.t().contiguous() if transposed else made, None if bias is None else bias.detach().bfloat16()
