"""Simplification of relations between sizes: ``a - b <= 0`` and ``b <= a`` are ``a == b``.

An export that allows sizes of 0 and 1 guards every branch on them. Once model and graph have been compared at these
sizes, such a guard only matters for larger sizes, and for these it may always hold.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable

import sympy  # type: ignore[import-untyped]  # has no types; a dependency of torch

from fxopt_capture.exporting.images import Place

_SIZE = re.compile(r"i\[(\d+)\]\.size\(\)\[(\d+)\]")
_SUMS = re.compile(r"[\s\d()*+-]* == [\s\d()*+-]*")  # equal ones, without the sizes in them


def distinct(conditions: Iterable[str]) -> list[str]:
    """Return the conditions without repetitions; ``a == b`` and ``b == a`` are the same."""
    found = {frozenset(condition.split(" == ")): condition for condition in reversed(list(conditions))}
    return list(reversed(found.values()))


def joined(conditions: Iterable[str]) -> list[str]:
    """Return equivalent conditions, with differences compared to zero, bounds and pairs of inequalities simplified.

    >>> a, b = "i[0].size()[1]", "i[1].size()[1]"
    >>> joined([f"{a} + ((-1)*{b}) <= 0", f"min(9, {a}) == {a}", f"{b} <= {a}"])
    ['i[0].size()[1] == i[1].size()[1]', 'i[0].size()[1] <= 9']
    """
    plain = list(map(_simplified, conditions))
    found: dict[str, str] = {}
    for condition in plain:
        left, operator, right = condition.partition(" <= ")
        opposite = f"{right} <= {left}"
        if not operator or left == right or opposite not in plain:
            found[condition] = condition
        elif opposite not in found:
            found[condition] = f"{left} == {right}"
    return list(found.values())


def _simplified(source: str) -> str:
    """Return ``a <= b`` for ``a + -1 * b <= 0``, ``n <= 9`` for ``min(9, n) == n``, others as they are."""
    match ast.parse(source, mode="eval").body:
        case ast.Compare(ast.BinOp(left, ast.Add(), right), [ast.LtE()], [ast.Constant(0)]):
            for term, other in ((left, right), (right, left)):
                match term:
                    case ast.BinOp(ast.UnaryOp(ast.USub(), ast.Constant(1)), ast.Mult(), negated):
                        return f"{ast.unparse(other)} <= {ast.unparse(negated)}"
        case ast.Compare(left, [ast.Eq()], [right]):
            for call, other in ((left, right), (right, left)):
                match call:
                    case ast.Call(ast.Name("min" | "max" as name), [_, _] as arguments):
                        rest = [text for text in map(ast.unparse, arguments) if text != ast.unparse(other)]
                        if len(rest) == 1:
                            return f"{ast.unparse(other)} {'<=' if name == 'min' else '>='} {rest[0]}"
    return source


def dependence(code: str) -> tuple[Place, Place, int] | None:
    """Read ``a == b + 1``: return its two sizes and how much larger the first is; None for any other condition.

    >>> dependence("1 + i[0].size()[2] == i[1].size()[1]")
    ((0, 2), (1, 1), -1)
    """
    sizes = list(dict.fromkeys(_SIZE.findall(code)))
    if len(sizes) != 2 or not _SUMS.fullmatch(_SIZE.sub("", code)):
        return None
    one, other = sympy.symbols("one other")
    for (index, dim), name in zip(sizes, ("one", "other"), strict=True):
        code = code.replace(f"i[{index}].size()[{dim}]", name)
    left, _, right = code.partition(" == ")
    # After the match, only numbers, `one`, `other`, `+`, `-`, `*` and parentheses can be in the text.
    difference = sympy.expand(eval(f"({left}) - ({right})", {"one": one, "other": other}))
    first, second = ((int(index), int(dim)) for index, dim in sizes)
    for sign in (1, -1):
        rest = difference - sign * (one - other)
        if rest.is_Integer:
            return first, second, -sign * int(rest)
    return None


Interval = tuple[float, float]

_ANYTHING: Interval = (-math.inf, math.inf)


def beyond_small_sizes(conditions: Iterable[str]) -> list[str]:
    """Return conditions equivalent for sizes from 2, without those that always hold for such sizes.

    >>> size = "i[0].size()[1]"
    >>> beyond_small_sizes([f"{size} > 1", f"{size} + 1 != 1", f"{size} != 5"])
    ['i[0].size()[1] != 5']
    """
    given = list(conditions)
    units = _Units(given)
    return [condition for condition in given if not _always(units.visit(ast.parse(condition, mode="eval").body))]


class _Units(ast.NodeTransformer):
    """Removes factors that a condition demands to be 1 from products: ``a * (b - c) >= 2`` becomes ``a >= 2``."""

    def __init__(self, codes: Iterable[str]) -> None:
        self.factors = set()
        for code in codes:
            match ast.parse(code, mode="eval").body:
                case ast.Compare(left, [ast.Eq()], [ast.Constant(1)]):
                    self.factors.add(ast.unparse(left))

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if isinstance(node.op, ast.Mult):
            for factor, other in ((node.left, node.right), (node.right, node.left)):
                if ast.unparse(factor) in self.factors:
                    found: ast.AST = self.visit(other)
                    return found
        return self.generic_visit(node)


def _always(node: ast.expr) -> bool:
    """Return whether a comparison holds for all sizes from 2."""
    if not isinstance(node, ast.Compare) or len(node.ops) > 1:
        return False
    (left_low, left_high), (right_low, right_high) = _interval(node.left), _interval(node.comparators[0])
    match node.ops[0]:
        case ast.NotEq():
            return left_low > right_high or left_high < right_low
        case ast.Gt():
            return left_low > right_high
        case ast.GtE():
            return left_low >= right_high
        case ast.Lt():
            return left_high < right_low
        case ast.LtE():
            return left_high <= right_low
    return False


def _interval(node: ast.expr) -> Interval:
    """Return bounds on the value of an expression over sizes from 2."""
    if _SIZE.fullmatch(ast.unparse(node)):
        return (2, math.inf)
    match node:
        case ast.Constant(int(value)):
            return (value, value)
        case ast.Call(ast.Name("min" | "max" as name), arguments):
            lows, highs = zip(*map(_interval, arguments), strict=True)
            return (min(lows), min(highs)) if name == "min" else (max(lows), max(highs))
        case ast.BinOp(left, (ast.Add() | ast.Mult()) as operator, right):
            (left_low, left_high), (right_low, right_high) = _interval(left), _interval(right)
            if isinstance(operator, ast.Add):
                return (left_low + right_low, left_high + right_high)
            # With a negative factor, the bounds would change places.
            if left_low > 0 and right_low > 0:
                return (left_low * right_low, left_high * right_high)
    return _ANYTHING
