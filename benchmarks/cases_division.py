"""Cases of divisions by constants."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial

import torch
from torch import Tensor

from benchmarks.cases import Case, case
from benchmarks.nets import Flow, Net

CONSTANTS = (2, 3, 8.0, 0.1, 41, -7, 1e-40, 1e300, 1e-310, 0, math.inf, math.nan, True)
SHAPES = ((3, 49), (1, 98), (2, 49))
FLOWS: dict[str, Flow] = {
    "of a shape": lambda m, x: x * (x.shape[-1] / 49),
    "of a shape, floored": lambda m, x: x * (x.shape[-1] / 49 // 1),
    "of a shape, compared": lambda m, x: x * ((x.shape[-1] / 49 == 1) + 1),
    "floored": lambda m, x: ((x * 3).round() * 41 / 41).floor(),
    "floored by //": lambda m, x: (x * 3).round() * 41 / 41 // 1,
    "compared": lambda m, x: ((x * 3).round() * 41 / 41 == (x * 3).round()) * 1.0,
    "made an integer": lambda m, x: ((x * 3).round() * 41 / 41).int(),
    "function": lambda m, x: torch.div(x, 3),
    "method": lambda m, x: x.div(3),
    "in place": lambda m, x: (x * 1).div_(3),
    "rounding mode": lambda m, x: torch.div((x * 3).round() * 41, 41, rounding_mode="floor"),
    "by a tensor": lambda m, x: x / (x.abs().sum() + 1),
    "of a number by a tensor": lambda m, x: 3 / (x.abs() + 1),
}


def division_cases() -> Iterator[Case]:
    """Cases of every constant in every dtype, and of every operation that reads a quotient."""
    for constant in CONSTANTS:
        for dtype in ("float32", "bfloat16", "int64"):
            topic = "by 0, infinity or NaN" if not math.isfinite(constant) or not constant else _topic(constant, dtype)
            yield case("division", topic, f"by {constant}", partial(net, constant), SHAPES, dtype=dtype)
    for topic, flow in FLOWS.items():
        yield case("division", topic, "", partial(Net, flow), SHAPES)


def net(constant: float) -> Net:
    """A division by a constant."""

    def flow(m: object, x: Tensor) -> Tensor:
        return x / constant

    return Net(flow)


def _topic(constant: float, dtype: str) -> str:
    if dtype == "int64":
        return "of integers"
    return "by a plain constant" if 1e-3 < abs(constant) < 1e3 else "by a constant far from 1"
