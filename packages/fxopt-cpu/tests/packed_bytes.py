"""An int8 weight as the operators take it."""

from __future__ import annotations

from torch import Tensor

from fxopt_cpu.operators.linear import pack, padded_scale, sums_of


def pack_bytes(integers: Tensor, scale: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the panels, scales and sums of an int8 weight (out, in) with one scale for each row."""
    panels = pack(integers)
    return panels, padded_scale(scale), sums_of(panels)
