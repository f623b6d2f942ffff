"""``x / c`` -> ``x * (1 / c)`` for a Python number ``c``, where that is safe.

Unless ``c`` is a power of two, a product with the rounded inverse differs from the quotient in the last bit for some
values. That matters where the quotient is rounded to an integer or compared, so a division is refused if its readers
do so, also behind views, copies and choices among its elements, or store it, and so is a division in place: what else
reads that memory is not followed. After arithmetic, the last bit is uncertain anyway, and readers are not looked at.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, ClassVar

import torch
from torch._ops import OpOverload
from torch.fx import Node

from fxopt_core import Refusal
from fxopt_rewrite import (
    Editor,
    ElementwiseCall,
    GraphIndex,
    Obstacle,
    ReversibleSitePass,
    is_python_number,
    read_elementwise,
    read_operation,
    tensor_facts,
    words,
)


@dataclass(frozen=True, eq=False)
class ConstantDivision:
    """A division of a node's value by a Python number."""

    call: ElementwiseCall
    dividend: Node
    constant: int | float
    rounding: Callable[[], Mapping[Node, Node]]

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

    Refused if ``1 / c`` is not finite and normal in the dtype of the computation, if ``x`` is shape arithmetic, and if
    what reads the quotient floors, rounds, compares or stores it or makes it an integer (except for powers of two,
    whose inverse is exact; other divisions in place stay). Undoing restores the exact constant.

    Source:
        IEEE 754-2019, section 5.4.1: quotient and product are each rounded once, so a product with a rounded inverse
        may differ in the last bit. If the inverse is exact, as for powers of two, both round the same number.

    Cost:
        As many operations as before, of a kind that is cheaper on most processors; on large tensors, memory bandwidth
        is the limit and they take the same time. The pass changes no tensor and is linear in the number of nodes.

    >>> class Scale(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x / 8
    >>> graph_module = ChangeTrueDivToMulByInverse()(torch.fx.symbolic_trace(Scale()))
    >>> print(graph_module.code.strip().splitlines()[1].strip())
    mul = x * 0.125;  x = None
    """

    reasons: ClassVar[Mapping[str, str]] = {
        "unsafe-constant": "The constant's inverse is not finite or not normal in the dtype of the computation. "
        "Compute in a wider dtype, if there is one that holds it.",
        "shape-arithmetic": "The dividend is a Python number that is computed from shapes; a product would round. "
        "Nothing to do: no tensor is divided.",
        "rounded-quotient": "An operation that reads the quotient rounds, compares or stores it, or makes it an "
        "integer. Nothing to do, except to divide by a power of two, whose inverse is exact.",
    }

    def match(self, index: GraphIndex) -> Iterator[ConstantDivision | Refusal]:
        """Yield the divisions by Python numbers."""
        # One walk over the graph for all divisions, once one of them needs it.
        rounding = cache(partial(_rounding_readers, index))
        for node in index.nodes:
            operation = None if node.op == "call_module" else read_operation(index, node)
            call = read_elementwise(node) if operation is not None and operation.name == "div" else None
            if isinstance(call, Obstacle):
                yield Refusal(call.site, call.reason, f"{call.message}; it stays as it is", (node.name,))
            elif call is None or not isinstance(call.left, Node) or not isinstance(call.right, int | float):
                continue
            elif call.rounding_mode is not None:
                message = f"node `{node.name}` rounds its quotient; it stays as it is"
                yield Refusal(node.name, "rounding-mode", message, (node.name,))
            elif not isinstance(call.right, bool):
                yield ConstantDivision(call, call.left, call.right, rounding)

    def check(self, site: ConstantDivision, index: GraphIndex) -> Refusal | None:
        """Refuse unsafe constants, shape arithmetic, and quotients whose last bit matters."""
        name, value = site.label, site.dividend
        if is_python_number(value):
            message = f"node `{name}` divides `{value.name}`, a Python number; a product would round differently"
            return index.refuse(name, "shape-arithmetic", message, *site.nodes)
        facts = tensor_facts(value)
        # float16 has the narrowest range of the common dtypes: an inverse that is safe there is safe in the others.
        dtype = torch.float16 if facts is None else facts.dtype
        # Integers are divided in the default dtype.
        dtype = dtype.to_real() if dtype.is_floating_point or dtype.is_complex else torch.get_default_dtype()
        if not _has_safe_inverse(site.constant, dtype):
            if facts is None and _has_safe_inverse(site.constant, torch.float32):
                message = f"whether the inverse of {site.constant} at node `{name}` is normal depends on the dtype of"
                message = f"{message} `{value.name}`, which is unknown; call infer_shapes first"
                return index.refuse(name, "shape-unknown", message, *site.nodes)
            message = f"the inverse of {site.constant} at node `{name}` is not finite and normal in {dtype}"
            return index.refuse(name, "unsafe-constant", message, *site.nodes)
        if math.frexp(abs(site.constant))[0] == 0.5:  # powers of two are exact
            return None
        if site.call.inplace:
            message = f"node `{name}` divides in place, and what reads that memory may round or compare the quotient"
            return index.refuse(name, "rounded-quotient", message, *site.nodes)
        reader = site.rounding().get(site.call.node)
        if reader is not None:
            message = f"node `{reader.name}` rounds, compares or stores the result of node `{name}`, or may do so"
            return index.refuse(name, "rounded-quotient", message, *site.nodes)
        return None

    def rewrite(self, site: ConstantDivision, edit: Editor) -> None:
        """Multiply, in place where the division is."""
        node = site.call.node
        product: Callable[..., Any] = operator.imul if site.call.inplace else operator.mul
        if isinstance(node.target, OpOverload):  # inductor takes ATen graphs with ATen operators alone
            product = torch.ops.aten.mul_.Tensor if site.call.inplace else torch.ops.aten.mul.Tensor
        edit.replace(node, edit.call_function(product, site.dividend, 1.0 / site.constant, before=node, like=[node]))


def _has_safe_inverse(constant: int | float, dtype: torch.dtype) -> bool:
    """Return whether a constant is finite and nonzero, and its inverse finite and normal in a dtype."""
    try:
        inverse = abs(1.0 / constant)
    # The integer may be too large for a float.
    except (ZeroDivisionError, OverflowError):
        return False
    limits = torch.finfo(dtype)
    # Below tiny, numbers have fewer digits.
    return math.isfinite(constant) and limits.tiny <= inverse <= limits.max


#: Operations that round or compare a value, by their names in `fxopt_rewrite.Effects`.
_ROUNDING = words(
    """
    floor ceil round trunc fix frac fmod mod imod remainder floor_divide floordiv ifloordiv divmod sign sgn signbit
    eq ne lt le gt ge equal isclose allclose isin argmax argmin argsort nonzero searchsorted bucketize heaviside
    histc histogram histogramdd frexp argwhere count_nonzero nonzero_static unique_consecutive poisson binomial
    int bool long short char byte item _local_scalar_dense tolist numpy builtins.int builtins.bool builtins.float
    builtins.round threshold _threshold hardshrink nn.Threshold nn.Hardshrink logical_and logical_or logical_xor
    logical_not all any one_hot bernoulli multinomial unique fake_quantize_per_tensor_affine quantize_per_tensor
    """
)

#: Operations whose results hold elements of their inputs, or bounds and signs of them.
_PASSING = words(
    """
    clone _to_copy cat concat concatenate stack hstack vstack dstack repeat repeat_interleave tile flip roll index
    gather index_select take take_along_dim masked_select masked_fill where pad constant_pad_nd nan_to_num abs neg relu
    nn.ReLU clamp clip max min amax amin maximum minimum median sort topk kthvalue mode tril triu
    setitem copy fill index_put index_copy scatter masked_scatter
    """
)

_CONVERTING = frozenset({"to", "type", "type_as", "_to_copy"})
_ELEMENTS = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


def _rounding_readers(index: GraphIndex) -> Mapping[Node, Node]:
    """Return the nodes whose value is rounded later or may be, each with a node that does.

    Rounding means to floor, to compare, to store, or to make integers.
    """
    found: dict[Node, Node] = {}
    for node in reversed(index.nodes):
        effect = index.effects.effect(node)
        name, rounds = _plain_name(effect.operation), _rounds(node, index)
        for value in node.all_input_nodes:
            # ``out[:] = quotient``: later reads of out are not followed, so that storing counts as rounding.
            stores = effect.writes and value not in effect.writes
            if rounds or (stores and name in _PASSING):
                found[value] = node
            elif node in found and (value in effect.aliases or name in _PASSING):
                found[value] = found[node]
    return found


def _plain_name(operation: str | None) -> str:
    # ``_foreach_floor``, ``special_round`` and ``floor_`` are known by their plain names.
    return (operation or "").removeprefix("_foreach_").removeprefix("special_").rstrip("_")


def _rounds(node: Node, index: GraphIndex) -> bool:
    """Return whether a node floors, rounds, compares or converts what it reads, or may do so."""
    if node.op == "output":
        return False
    effect, facts = index.effects.effect(node), tensor_facts(node)
    if effect.opaque or effect.operation is None or node.kwargs.get("rounding_mode") is not None:
        return True  # what is unknown may round
    name = _plain_name(effect.operation)
    given = [each for each in (*node.args[1:], *node.kwargs.values()) if isinstance(each, torch.dtype)]
    if any(dtype in _ELEMENTS for dtype in given) or name in _ROUNDING:
        return True
    if facts is not None:  # comparisons, arguments of extremes, and conversions return integers
        # Calls that read only the shape round nothing, even if they return integers.
        return facts.dtype in _ELEMENTS and name not in ("size", "shape", "zeros_like", "ones_like", "full_like")
    return name in _CONVERTING and not given
