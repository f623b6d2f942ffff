"""The arithmetic of weights in int8 and bfloat16 beside `quantize`; key maps name these functions."""

from __future__ import annotations

from typing import NoReturn

import torch
from torch import Tensor

from fxopt_core import NotReversibleError
from fxopt_cpu.operators.linear import LARGEST

_MIGRATED = 0.8  # the share of the inputs' spread that weights take: on sentences, MiniLM has 25.2 dB; 20.6 at 0.6
_FARTHEST = 512  # of a shift


def rounding(weight: Tensor, ends: Tensor, depth: int) -> Tensor:
    """Return factors and shifts (2, in) that take inputs to integers: ``round(x * factor + shift)``, from -127 to 127.

    Each element of a row has its own factor and shift. The weight is divided by the factors before it is rounded;
    inputs and weight share the spread of an element as in SmoothQuant, https://arxiv.org/abs/2211.10438. Shifts are
    whole numbers.

    Args:
        weight: (out, in).
        ends: the least and largest value of each element, (2, in).
        depth: how many products a result sums: those of all taps, for convolutions.

    >>> rounding(torch.tensor([[1.0, 1.0]]), torch.tensor([[0.0, -2.0], [2.0, 0.0]]), 2).round().int()
    tensor([[ 127,  127],
            [-127,  127]], dtype=torch.int32)
    """
    tiny = torch.finfo(torch.float32).tiny ** 0.5
    sizes = weight.detach().abs().amax(0).float().clamp_min(tiny)
    middle = ends.mean(0)
    # So that sums of `depth` products fit 32 bits: a weight up to 127 times an integer up to 127 plus its shift.
    farthest = max(1, min(_FARTHEST, 2**31 // (LARGEST * depth) - LARGEST - 1))
    # Factors are at most 127 / spread, so this minimum keeps shifts, `middle * factor`, within `farthest`.
    spread = torch.maximum((ends[1] - ends[0]) / 2, middle.abs() * LARGEST / farthest).clamp_min(tiny)
    # By element: MiniLM has 13.9 dB with one range for all elements, 4.5 to 8 dB with clipped outliers.
    shared = spread**_MIGRATED / sizes ** (1 - _MIGRATED)
    factor = LARGEST / (shared * (spread / shared).amax())
    return torch.stack((factor, (-middle * factor).round()))


def static(weight: Tensor, *, transposed: bool = False) -> NoReturn:
    """Refuse to load other weights: the ranges were found with the former ones."""
    raise NotReversibleError(
        "its inputs are rounded by ranges that were found with the former weights: load the checkpoint into the "
        "original model, and optimize that with calibrate"
    )


def lost(*tensors: Tensor, **settings: object) -> NoReturn:
    """Refuse to restore: passes name this function as the ``restore`` of rounded weights."""
    raise NotReversibleError(
        "it was rounded, and the original values are lost. Keep the original checkpoint, save "
        "graph_module.state_dict(), or run the pass with keep_originals=True"
    )


def narrowed(weight: Tensor, *, transposed: bool = False) -> Tensor:
    """Return a weight as (out, in) in bfloat16; one stored as (in, out) is transposed.

    >>> narrowed(torch.tensor([[1.0 + 2**-9]]))
    tensor([[1.]], dtype=torch.bfloat16)
    """
    made = weight.detach().bfloat16()
    return made.t().contiguous() if transposed else made
