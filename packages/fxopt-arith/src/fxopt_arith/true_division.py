"""``x / c`` -> ``x * (1 / c)`` for a Python number ``c``, where that is safe.

A product by a rounded inverse differs from the quotient in the last bit for a share of all values, unless ``c`` is a
power of two. That matters only where the quotient is rounded to an integer or compared: such quotients are left alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.fx import Node

from fxopt_arith.rounding import RoundedValues
from fxopt_core import (
    Editor,
    GraphIndex,
    Obstacle,
    Refusal,
    ReversibleSitePass,
    TrueDivision,
    is_python_number,
    read_true_division,
    tensor_facts,
)


@dataclass(frozen=True, eq=False)
class ConstantDivision:
    """A division by a Python number."""

    call: TrueDivision
    constant: int | float
    rounded: Node | None

    @property
    def label(self) -> str:
        """The name of the node."""
        return self.call.label

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The division."""
        return (self.call.node,)


class ChangeTrueDivToMulByInverse(ReversibleSitePass[ConstantDivision]):
    """``x / c`` -> ``x * (1 / c)`` for a Python number ``c``, where that is safe.

    It is refused where ``1 / c`` is not finite and normal in the dtype of the computation, where ``x`` is shape
    arithmetic, and where the quotient is floored, rounded, compared or turned into an integer later (powers of two
    excepted, whose inverse is exact). Undoing gives back the very constant.

    Source:
        IEEE 754-2019, section 5.4.1: quotient and product are each rounded once, so that a product by a rounded inverse
        may differ in the last bit. Where the inverse is exact, as for powers of two, both round the same number.

    Cost:
        As many operations as before, of a kind that is cheaper on most processors; where memory is the limit, as it is
        for large tensors, they take the same time. The pass changes no tensor and is linear in the number of nodes.

    >>> class Scale(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x / 8
    >>> graph_module = ChangeTrueDivToMulByInverse()(torch.fx.symbolic_trace(Scale()))
    >>> print(graph_module.code.strip().splitlines()[1].strip())
    mul = x * 0.125;  x = None
    """

    def match(self, index: GraphIndex) -> Iterator[ConstantDivision | Refusal]:
        """Yield the divisions by Python numbers."""
        rounded = RoundedValues(index)
        for node in index.nodes:
            call = read_true_division(index, node)
            if isinstance(call, Obstacle):
                yield Refusal(call.site, call.reason, f"{call.message}; it stays as it is", (node.name,))
            elif call is not None and isinstance(call.divisor, int | float) and not isinstance(call.divisor, bool):
                yield ConstantDivision(call, call.divisor, rounded.by(node))

    def check(self, site: ConstantDivision, index: GraphIndex) -> Refusal | None:
        """Refuse unsafe constants, shape arithmetic and quotients whose last bit matters."""
        name, value = site.label, site.call.input
        if is_python_number(value):
            message = f"node `{name}` divides `{value.name}`, a Python number; a product would round in another way"
            return index.refuse(name, "shape-arithmetic", message, *site.nodes)
        facts = tensor_facts(value)
        dtype = _computed_in(facts.dtype) if facts is not None else torch.float16
        if not _has_safe_inverse(site.constant, dtype):
            if facts is None and _has_safe_inverse(site.constant, torch.float32):
                message = f"whether the inverse of {site.constant} at node `{name}` is normal depends on the dtype of"
                message = f"{message} `{value.name}`, which is not known; call infer_shapes first"
                return index.refuse(name, "shape-unknown", message, *site.nodes)
            message = f"the inverse of {site.constant} at node `{name}` is not finite and normal in {dtype}"
            return index.refuse(name, "unsafe-constant", message, *site.nodes)
        if site.rounded is not None and not _is_power_of_two(site.constant):
            message = f"node `{site.rounded.name}` rounds or compares what node `{name}` computes, or may do so"
            return index.refuse(name, "rounded-quotient", message, *site.nodes)
        return None

    def rewrite(self, site: ConstantDivision, edit: Editor) -> None:
        """Multiply in the same form: operator, function, method or in-place."""
        node, inverse = site.call.node, 1.0 / site.constant
        insert: Any = edit.call_method if node.op == "call_method" else edit.call_function
        edit.replace(node, insert(site.call.product, site.call.input, inverse, before=node, like=[node]))


def _computed_in(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which a true division of such values is computed."""
    if dtype.is_complex:
        return {torch.complex32: torch.float16, torch.complex64: torch.float32}.get(dtype, torch.float64)
    return dtype if dtype.is_floating_point else torch.get_default_dtype()


def _has_safe_inverse(constant: int | float, dtype: torch.dtype) -> bool:
    """Return whether a constant is finite and not zero, and its inverse finite and normal in a dtype."""
    try:
        inverse = abs(1.0 / constant)
    except (ZeroDivisionError, OverflowError):
        return False
    limits = torch.finfo(dtype)
    return math.isfinite(constant) and limits.tiny <= inverse <= limits.max


def _is_power_of_two(constant: int | float) -> bool:
    return math.frexp(abs(constant))[0] == 0.5
