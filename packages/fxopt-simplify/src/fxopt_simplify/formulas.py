"""Formulas of one variable in a normal form, so that however an activation is written, it reads the same.

A formula is a sum of products: ``0.5 * x * (1 + tanh(x))`` and ``x / 2 + x * tanh(x) / 2`` are both
``0.5 tanh(1 x) x + 0.5 x``. Coefficients count to six digits, as writers of models round their constants.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from math import isfinite
from typing import Any, TypeAlias

from torch.fx import Node

from fxopt_rewrite import GraphIndex, read_operation

Product: TypeAlias = tuple[tuple[str, int], ...]
"""Factors with their powers, sorted; a factor is ``x`` or a function of a formula, as text."""

FUNCTIONS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    **{name: (name, {}) for name in ("erf", "relu6", "sigmoid", "tanh")},
    "hardtanh": ("relu6", {"min_val": 0, "max_val": 6}),
    "softplus": ("softplus", {"beta": 1, "threshold": 20}),
}
"""Operations to the function that they are with these settings."""

_LARGEST = 16
"""Products of a formula, and nodes that one may consist of."""
_HIGHEST = 4
"""The highest power that is multiplied out."""


class Formula:
    """A sum of products, with a coefficient for each.

    >>> x = Formula.variable()
    >>> (x + x**3 * 0.5).through("tanh").text
    '1 tanh(0.5 x^3 + 1 x)'
    """

    def __init__(self, terms: Mapping[Product, float]) -> None:
        self.terms = {product: factor for product, factor in terms.items() if factor}

    @classmethod
    def variable(cls) -> Formula:
        """Return the formula that is the variable."""
        return cls({(("x", 1),): 1.0})

    @cached_property
    def text(self) -> str:
        """The formula in its normal form."""
        return " + ".join(sorted(_text(product, factor) for product, factor in self.terms.items()))

    def through(self, function: str) -> Formula:
        """Return a function of this formula."""
        return Formula({((f"{function}({self.text})", 1),): 1.0})

    def __add__(self, other: Formula | float) -> Formula:
        terms = dict(self.terms)
        for product, factor in _as_formula(other).terms.items():
            terms[product] = terms.get(product, 0.0) + factor
        return Formula(terms)

    def __mul__(self, other: Formula | float) -> Formula:
        terms: dict[Product, float] = {}
        for left, first in self.terms.items():
            for right, second in _as_formula(other).terms.items():
                product = tuple(sorted((Counter(dict(left)) + Counter(dict(right))).items()))
                terms[product] = terms.get(product, 0.0) + first * second
        return Formula(terms)

    def __pow__(self, exponent: int) -> Formula:
        product = self
        for _ in range(exponent - 1):
            product = product * self
        return product


def _text(product: Product, factor: float) -> str:
    return " ".join([f"{factor:.6g}", *(name if power == 1 else f"{name}^{power}" for name, power in product)])


def _as_formula(value: Formula | float) -> Formula:
    return value if isinstance(value, Formula) else Formula({(): float(value)})


def formulas_of(index: GraphIndex, variable: Node) -> Iterator[tuple[Node, Formula]]:
    """Yield the nodes whose values are functions of one value alone, element by element, with the formula of each."""
    known = {variable: Formula.variable()}
    waiting = list(variable.users)
    while waiting and len(known) <= _LARGEST:
        node = waiting.pop(0)
        formula = None if node in known else _read(index, node, known)
        if formula is not None and len(formula.terms) <= _LARGEST:
            known[node] = formula
            waiting += node.users
            yield node, formula


def _read(index: GraphIndex, node: Node, known: Mapping[Node, Formula]) -> Formula | None:
    operation = read_operation(index, node)
    if operation is None or operation.inplace:
        return None
    if operation.name in FUNCTIONS:
        function, settings = FUNCTIONS[operation.name]
        given = {key: value for key, value in operation.arguments.items() if key != "input"}
        inner = None if operation.input is None else known.get(operation.input)
        return None if inner is None or given != settings else inner.through(function)
    if len(operation.operands) != 2 or any(operation.arguments.get(key, value) != value for key, value in _PLAIN):
        return None
    left, right = (known.get(value) if isinstance(value, Node) else _number(value) for value in operation.operands)
    if left is None or right is None:
        return None
    constant = right.terms.get((), 0.0) if right.terms.keys() <= {()} else None
    match operation.name:
        case "add":
            return left + right
        case "sub":
            return left + right * -1
        case "mul":
            return left * right
        case "div" if constant:
            return left * (1 / constant)
        case "pow" if constant is not None and constant in range(1, _HIGHEST + 1):
            return left ** int(constant)
    return None


_PLAIN = (("alpha", 1), ("rounding_mode", None))
"""Arguments that make another operation of a sum or a quotient, unless they have this value."""


def _number(value: Any) -> Formula | None:
    return _as_formula(value) if type(value) in (int, float) and isfinite(value) else None
