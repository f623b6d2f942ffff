"""``0.5 * x * (1 + tanh(...))`` -> ``gelu(x, approximate="tanh")``: activations that models write out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from math import pi, sqrt
from typing import Any

import torch
import torch.nn.functional as F

from fxopt_rewrite import Pattern, PatternPass

_Formula = Callable[..., Any]
#: Ways to write ``x * (1 + y) / 2``: patterns match in any order and grouping, but multiply nothing out.
_HALVES: tuple[_Formula, ...] = (
    lambda x, y: 0.5 * x * (1 + y),
    lambda x, y: x * (0.5 + 0.5 * y),
    lambda x, y: 0.5 * x + 0.5 * x * y,
)
#: Ways to write the argument of tanh in GELU, ``sqrt(2 / pi) * (x + 0.044715 * x**3)``.
_CUBICS: tuple[_Formula, ...] = (
    lambda x: sqrt(2 / pi) * (x + 0.044715 * x**3),
    lambda x: sqrt(2 / pi) * x * (1 + 0.044715 * x * x),
    lambda x: sqrt(2 / pi) * x + sqrt(2 / pi) * 0.044715 * x**3,
)
_OTHERS: tuple[tuple[_Formula, _Formula], ...] = (
    (lambda x: x * torch.sigmoid(x), F.silu),
    (lambda x: x * torch.tanh(F.softplus(x)), F.mish),
    (lambda x: x * F.relu6(x + 3) / 6, F.hardswish),
    (lambda x: x * F.hardtanh(x + 3, 0, 6) / 6, F.hardswish),
)


class FuseActivations(PatternPass):
    """``0.5 * x * (1 + tanh(0.79788 * (x + 0.044715 * x ** 3)))`` -> ``gelu(x, approximate="tanh")``.

    GELU with the error function and with tanh, SiLU, Mish and hardswish are found however their sums and products are
    ordered and grouped, as long as the constants agree to six digits. Results are the same except for rounding.

    Refused: intermediate values that something else reads, values written in place meanwhile, and dtypes other than
    float32 and float64, where the fused function rounds less often. Dtypes are those of the capture, or of the example
    given to `infer_shapes`; activations that are given integers afterwards are an error of torch.

    Source:
        Hendrycks and Gimpel, Gaussian Error Linear Units, https://arxiv.org/abs/1606.08415, section 2: both formulas
        of GELU, and SiLU.

    Cost:
        One call instead of two to eight, and as many fewer values of the input's size in memory.

    >>> from fxopt_rewrite import infer_shapes
    >>> graph = torch.fx.symbolic_trace(lambda x: x * 0.5 * (1.0 + torch.erf(x / 2**0.5)))
    >>> print(FuseActivations()(infer_shapes(graph, torch.ones(2))).code.strip())
    def forward(self, x):
        gelu = torch._C._nn.gelu(x);  x = None
        return gelu
    """

    def patterns(self) -> Iterator[Pattern]:
        """Yield the formulas of each activation."""
        for half in _HALVES:
            yield Pattern(lambda x, half=half: half(x, torch.erf(x * sqrt(0.5))), F.gelu)
        for half, cubic in product(_HALVES, _CUBICS):
            tanh = partial(F.gelu, approximate="tanh")
            yield Pattern(lambda x, half=half, cubic=cubic: half(x, torch.tanh(cubic(x))), tanh)
        for formula, function in _OTHERS:
            yield Pattern(formula, function)
