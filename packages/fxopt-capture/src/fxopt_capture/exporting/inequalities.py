"""Simplification of relations between sizes: ``a - b <= 0`` and ``b <= a`` are ``a == b``.

An export that allows sizes of 0 and 1 guards every branch on them. Once model and graph have been compared at these
sizes, such a guard only matters for larger sizes, where it is simpler: ``min(512, n) == n or min(512, n) == 1`` is
``n <= 512``.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Collection, Iterable

import sympy  # type: ignore[import-untyped]  # has no types; a dependency of torch

Place = tuple[int, int]  # input, dimension

_SIZE = re.compile(r"i\[(\d+)\]\.size\(\)\[(\d+)\]")
_SUMS = re.compile(r"[\s\d()*+-]* == [\s\d()*+-]*")  # equal ones, without the sizes in them


def distinct(conditions: Iterable[str]) -> list[str]:
    """Return the conditions without repetitions; ``a == b`` and ``b == a`` are the same."""
    found = {frozenset(condition.split(" == ")): condition for condition in reversed(list(conditions))}
    return list(reversed(found.values()))


def joined(conditions: Iterable[str]) -> list[str]:
    """Return equivalent conditions, with differences compared to zero and pairs of inequalities simplified.

    >>> a, b = "i[0].size()[1]", "i[1].size()[1]"
    >>> joined([f"{a} + ((-1)*{b}) <= 0", f"{a} > 1", f"{b} <= {a}"])
    ['i[0].size()[1] == i[1].size()[1]', 'i[0].size()[1] > 1']
    """
    plain = list(map(_without_difference, conditions))
    found: dict[str, str] = {}
    for condition in plain:
        left, operator, right = condition.partition(" <= ")
        opposite = f"{right} <= {left}"
        if not operator or left == right or opposite not in plain:
            found[condition] = condition
        elif opposite not in found:
            found[condition] = f"{left} == {right}"
    return list(found.values())


def _without_difference(source: str) -> str:
    """Return ``a <= b`` for ``a + -1 * b <= 0``, and any other expression as it is."""
    match _parsed(source):
        case ast.Compare(ast.BinOp(left, ast.Add(), right), [ast.LtE()], [ast.Constant(0)]):
            for term, other in ((left, right), (right, left)):
                match term:
                    case ast.BinOp(ast.UnaryOp(ast.USub(), ast.Constant(1)), ast.Mult(), negated):
                        return f"{ast.unparse(other)} <= {ast.unparse(negated)}"
    return source


def _parsed(condition: str) -> ast.expr:
    return ast.parse(condition, mode="eval").body


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
    >>> beyond_small_sizes([f"{size} > 1", f"min(9, {size}) == {size}", f"{size} != 5"])
    ['i[0].size()[1] <= 9', 'i[0].size()[1] != 5']
    """
    simpler = [ast.unparse(_Bounds().visit(_parsed(condition))) for condition in conditions]
    units = _Units(simpler)
    kept = [condition for condition in simpler if not _always(units.visit(_parsed(condition)))]
    return distinct(condition for condition in kept if not _follows(_parsed(condition), kept))


def is_plain(condition: str) -> bool:
    """Return whether sizes from 2 would not simplify a condition.

    They would not simplify a comparison of one size with a number, an equation of products of sizes, or an equation of
    one size with the sum of another and a number.

    >>> size, other = "i[0].size()[1]", "i[1].size()[0]"
    >>> [is_plain(condition) for condition in (f"{size} <= 9", f"{size} * 4 == {other}", f"{size} % 2 == 0")]
    [True, True, False]
    """
    match _parsed(condition):
        case ast.Compare(left, [ast.Eq()], [right]):
            return (_is_product(left) and _is_product(right)) or dependence(condition) is not None
        case ast.Compare(left, [_], [right]):
            return all(_is_size(side) or isinstance(side, ast.Constant) for side in (left, right))
    return False


def _is_product(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _is_product(node.left) and _is_product(node.right)
    return _is_size(node) or isinstance(node, ast.Constant)


class _Bounds(ast.NodeTransformer):
    """Writes ``min(9, n) == n`` as ``n <= 9``, and ``max(9, n) == n`` as ``n >= 9``."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        match node:
            case ast.Compare(left, [ast.Eq()], [right]):
                for call, other in ((left, right), (right, left)):
                    match call:
                        case ast.Call(ast.Name("min" | "max" as name), [_, _] as arguments):
                            rest = [each for each in arguments if ast.dump(each) != ast.dump(other)]
                            if len(rest) == 1:
                                return ast.Compare(other, [ast.LtE() if name == "min" else ast.GtE()], rest)
        return node


class _Units(ast.NodeTransformer):
    """Removes factors that a condition demands to be 1 from products: ``a * (b - c) >= 2`` becomes ``a >= 2``."""

    def __init__(self, codes: Iterable[str]) -> None:
        self.factors = set()
        for code in codes:
            match _parsed(code):
                case ast.Compare(left, [ast.Eq()], [ast.Constant(1)]):
                    self.factors.add(ast.unparse(left))

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        if isinstance(node.op, ast.Mult):
            for factor, other in ((node.left, node.right), (node.right, node.left)):
                if ast.unparse(factor) in self.factors:
                    found: ast.AST = self.visit(other)
                    return found
        return self.generic_visit(node)


def _follows(node: ast.expr, kept: Collection[str]) -> bool:
    """Return whether one of several alternatives always holds, or is among the kept conditions."""
    alternatives = node.values if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) else []
    return any(_always(alternative) or ast.unparse(alternative) in kept for alternative in alternatives)


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
    if _is_size(node):
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
            if left_low > 0 and right_low > 0:
                return (left_low * right_low, left_high * right_high)
    return _ANYTHING


def _is_size(node: ast.expr) -> bool:
    return _SIZE.fullmatch(ast.unparse(node)) is not None
