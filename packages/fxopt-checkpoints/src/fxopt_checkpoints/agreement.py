"""Whether recomputed tensors agree with those of a module up to rounding.

They agree where ``|found - expected| <= 2 eps |expected| + 2 noise``. The first part covers rounding of the inputs and
of the result. It is too small if a result is a difference of large numbers, such as the bias that a matrix product
makes of a shift. So ``noise`` is how far the result moves when each input moves by one unit in the last place, the
largest of 16 draws. Each element is judged by itself: one wrong channel is found among thousands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

_DRAWS = 16


def disagreement(found: Tensor, expected: Tensor, moved: Callable[[], Iterator[Tensor]]) -> str | None:
    """Describe how tensors of one shape differ beyond rounding; return None if they do not.

    Args:
        found: the recomputed tensor.
        expected: the tensor of the module.
        moved: yields results for inputs that are moved by a rounding; called only if they decide.

    >>> disagreement(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 2.5]), lambda: iter(()))
    '1 of 2 elements differs, by up to 0.5 where rounding explains 6e-07: 2 instead of 2.5'
    """
    # Loading would round to the module's dtype, too.
    found = found.to(expected.device, expected.dtype)
    if expected.is_meta or torch.equal(found, expected):
        return None
    mine, theirs = _wide(found), _wide(expected)
    same = (mine == theirs) | (mine.isnan() & theirs.isnan())
    error, bound = (mine - theirs).abs(), torch.zeros_like(theirs.abs())
    if expected.is_floating_point() or expected.is_complex():
        # `eps * smallest_normal` is the distance between denormal numbers, to which values near zero are rounded. An
        # infinite value has an infinite bound, so it counts as the same only if it is equal.
        info = torch.finfo(expected.dtype)
        bound = 2 * info.eps * (theirs.abs() + info.smallest_normal)
        same |= (error <= bound) & theirs.isfinite()
        if not bool(same.all()):
            # Sixteen more runs of the function: only for elements that the first part of the bound does not cover.
            bound += 2 * _noise(mine, moved())
            same |= (error <= bound) & theirs.isfinite()
    if bool(same.all()):
        return None
    count, size = int((~same).sum()), same.numel()
    error = error.nan_to_num(nan=torch.inf).masked_fill(same, -1.0)
    worst = error.argmax()
    most, explained, is_now, was = (each.flatten()[worst].item() for each in (error, bound, mine, theirs))
    differ = "differs" if count == 1 else "differ"
    return (
        f"{count} of {size} elements {differ}, by up to {most:.3g} where rounding explains {explained:.0g}: "
        f"{is_now:.6g} instead of {was:.6g}"
    )


def _wide(tensor: Tensor) -> Tensor:
    """Return a tensor in a dtype in which differences are exact enough."""
    if tensor.is_complex():
        return tensor.to(torch.complex128)
    if not tensor.is_floating_point():
        return tensor.double()
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _noise(result: Tensor, moved: Iterator[Tensor]) -> Tensor:
    """Return how far a result moves at most; zero where it is no longer finite."""
    noise = torch.zeros_like(result.abs())
    for each in moved:
        noise = torch.maximum(noise, (_wide(each.to(result.device)) - result).abs().nan_to_num(posinf=0.0))
    return noise


def nudged(inputs: Mapping[str, Tensor | None]) -> Iterator[dict[str, Tensor | None]]:
    """Yield draws of the inputs in which each element is moved up or down by one unit in the last place.

    >>> (draw, *_) = nudged({"x": torch.ones(1), "absent": None})
    >>> abs(draw["x"].item() - 1.0) == torch.finfo(torch.float32).eps, draw["absent"]
    (True, None)
    """
    # A generator of its own: each run draws the same, and the caller's random numbers stay as they are.
    generator = torch.Generator().manual_seed(0)
    for _ in range(_DRAWS):
        yield {name: None if tensor is None else _nudged(tensor, generator) for name, tensor in inputs.items()}


def _nudged(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if not (tensor.is_floating_point() or tensor.is_complex()):
        return tensor
    signs = torch.randint(0, 2, tensor.shape, generator=generator).to(tensor.device) * 2 - 1
    return (_wide(tensor) * (1.0 + torch.finfo(tensor.dtype).eps * signs)).to(tensor.dtype)
