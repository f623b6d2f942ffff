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
_MIGRATED = 0.8  # the share of the inputs' spread that weights take: on sentences, MiniLM has 25.2 dB; 20.6 at 0.6
_FARTHEST = 512  # of a shift, so that sums of products with it fit 32 bits


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


def rounding(weight: Tensor, ends: Tensor, *, transposed: bool = False) -> Tensor:
    """Return factors and shifts (2, in) that take inputs to integers: ``round(x * factor + shift)``, from -127 to 127.

    Each element of a row has its own, and the weight is divided by the factors before it is rounded itself; how the two
    share what spreads an element from the others is as in SmoothQuant, https://arxiv.org/abs/2211.10438. Shifts are
    whole numbers.

    Args:
        weight: (out, in).
        ends: the least and largest value of each element, (2, in).
        transposed: whether the weight is (in, out) instead.

    >>> rounding(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, -2.0], [2.0, 0.0]])).round().int()
    tensor([[ 127,  127],
            [-127,  127]], dtype=torch.int32)
    """
    tiny = torch.finfo(torch.float32).tiny ** 0.5
    sizes = weight.detach().abs().amax(1 if transposed else 0).float().clamp_min(tiny)
    middle = ends.mean(0)
    spread = torch.maximum((ends[1] - ends[0]) / 2, middle.abs() * LARGEST / _FARTHEST).clamp_min(tiny)
    shared = spread**_MIGRATED / sizes ** (1 - _MIGRATED)
    factor = LARGEST / (shared * (spread / shared).amax())
    return torch.stack((factor, (-middle * factor).round()))


def static(weight: Tensor, *, transposed: bool = False) -> NoReturn:
    """Refuse to load other weights: the ranges were found with the former ones."""
    raise NotReversibleError(
        "its inputs are rounded by ranges that were found with the former weights: load the checkpoint into the "
        "original model, and optimize that with calibrate"
    )


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
