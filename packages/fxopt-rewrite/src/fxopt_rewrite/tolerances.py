"""Tolerances by dtype: how far the results of a transformed module may lie from those of the original.

Values agree where ``|actual - expected| <= atol + rtol * |expected|``. In exact arithmetic a pass computes the same, so
only rounding differs: a merged matrix product may sum in another order, a folded batch norm rounds its weights once
more. Each of these is an error of a few units in the last place (``eps``) of one layer's result, relative to the size
of its terms and not of its sum, and later layers carry it along.

- **float32: rtol 1e-4, atol 1e-5.** Reordering a sum of 4096 products shifts it by about 64 half units, 4e-6 of the
  size of its terms; residual networks of dozens of layers keep it at that order. Batch norms folded in 24 residual
  blocks were measured to shift results of size 1 by 7e-7. The rest is headroom for wide layers, other kernels, and
  sums that cancel. A real mistake (a bias that is not scaled, 1/c in half precision) is of order 1e-3 and more. A GPU
  that computes float32 in TF32 exceeds this; its results also change that much when kernels change.
- **float64: rtol 1e-9, atol 1e-11.** The same reasoning gives 1e-13; the rest is headroom, and a weight that was
  rounded to float32 on the way (1e-7) is still noticed.
- **bfloat16: rtol 5e-2, atol 2e-2** and **float16: rtol 1e-2, atol 5e-3.** Every layer rounds its result, and a shift
  of one unit grows with the root of the number of layers: after 24 layers bfloat16 was off by 3e-2 and float16 by 4e-3
  from float64, with or without a pass, and folding moved the results by 3e-2 and 2e-3. Closer agreement would be
  chance.
- **Complex dtypes** as their real and imaginary parts' dtype; **integers and bool** exactly.
- **Other floating-point dtypes** (8 bits): rtol of two units in the last place, atol of one, at most 0.5 and 0.25. They
  store results computed in other dtypes, so errors do not accumulate, and one step is a whole unit: with a larger
  multiple, zero would pass for one.

The absolute part assumes values of order 1, such as normalised activations and logits; give your own for other scales.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Tolerance:
    """How far values may lie apart: ``|actual - expected| <= atol + rtol * |expected|``."""

    rtol: float
    atol: float


_STATED = {
    torch.float64: Tolerance(rtol=1e-9, atol=1e-11),
    torch.float32: Tolerance(rtol=1e-4, atol=1e-5),
    torch.bfloat16: Tolerance(rtol=5e-2, atol=2e-2),
    torch.float16: Tolerance(rtol=1e-2, atol=5e-3),
}


def tolerance(dtype: torch.dtype) -> Tolerance:
    """Return how far values of a dtype may lie apart; the module's description says why.

    >>> tolerance(torch.float32)
    Tolerance(rtol=0.0001, atol=1e-05)
    >>> tolerance(torch.int64)
    Tolerance(rtol=0.0, atol=0.0)
    """
    real = dtype.to_real() if dtype.is_complex else dtype
    if real in _STATED:
        return _STATED[real]
    if not real.is_floating_point:
        return Tolerance(rtol=0.0, atol=0.0)
    unit = min(torch.finfo(real).eps, 0.25)
    return Tolerance(rtol=2 * unit, atol=unit)
