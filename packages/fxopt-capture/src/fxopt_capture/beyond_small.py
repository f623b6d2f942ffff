"""What the guards of an export for all sizes demand of sizes that are at least 2, in the shortest words.

An export that allows sizes of 0 and 1 guards every branch on them. Where model and graph were compared at these sizes,
such a guard has nothing more to say, and what else it says is said more simply: `min(512, n) == n or min(512, n) == 1`
is `n <= 512`.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Iterable, Mapping

from .conditions import distinct
from .guards import Condition
from .inequalities import dependence, parsed

Interval = tuple[float, float]

_SIZE = re.compile(r"i\[\d+\]\.size\(\)\[\d+\]")
_ANYTHING: Interval = (-math.inf, math.inf)
_BOUNDS: Mapping[str, type[ast.cmpop]] = {"min": ast.LtE, "max": ast.GtE}


def beyond_small_sizes(conditions: Iterable[Condition]) -> list[Condition]:
    """Return conditions that say the same about sizes of 2 and more, without those that always hold there.

    >>> size = "i[0].size()[1]"
    >>> given = [Condition(code, code) for code in (f"{size} > 1", f"min(9, {size}) == {size}", f"{size} != 5")]
    >>> [condition.code for condition in beyond_small_sizes(given)]
    ['i[0].size()[1] <= 9', 'i[0].size()[1] != 5']
    """
    simpler = [Condition(_simplified(condition.code), _simplified(condition.text)) for condition in conditions]
    units = _Units(condition.code for condition in simpler)
    kept = [condition for condition in simpler if not _always(units.removed(parsed(condition.code)))]
    codes = {condition.code for condition in kept}
    return distinct(condition for condition in kept if not _follows(parsed(condition.code), codes))


def is_plain(condition: Condition) -> bool:
    """Whether a condition would be the same without sizes of 0 and 1.

    So are comparisons of one size with a number, and of products of sizes with each other, and that one size is another
    and a number: there is nothing in them that sizes of at least 2 would simplify, but for factors to cancel.

    >>> size, other = "i[0].size()[1]", "i[1].size()[0]"
    >>> [is_plain(Condition(code, code)) for code in (f"{size} <= 9", f"{size} * 4 == {other}", f"{size} % 2 == 0")]
    [True, True, False]
    """
    node = parsed(condition.code)
    if not isinstance(node, ast.Compare) or len(node.ops) > 1:
        return False
    sides = (node.left, node.comparators[0])
    if isinstance(node.ops[0], ast.Eq):
        return all(map(_is_product, sides)) or dependence(condition.code) is not None
    return all(_is_size(side) or isinstance(side, ast.Constant) for side in sides)


def _is_product(node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        return _is_product(node.left) and _is_product(node.right)
    return _is_size(node) or isinstance(node, ast.Constant)


def _simplified(source: str) -> str:
    node = parsed(source)
    return source if node is None else ast.unparse(_Bounds().visit(node))


class _Bounds(ast.NodeTransformer):
    """Writes ``min(9, n) == n`` as ``n <= 9``, and ``max(9, n) == n`` as ``n >= 9``."""

    def visit_Compare(self, node: ast.Compare) -> ast.AST:
        """Rewrite one comparison, where it is of this kind."""
        if len(node.ops) > 1 or not isinstance(node.ops[0], ast.Eq):
            return node
        for call, other in ((node.left, node.comparators[0]), (node.comparators[0], node.left)):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name) or len(call.args) != 2:
                continue
            operator = _BOUNDS.get(call.func.id)
            rest = [argument for argument in call.args if ast.dump(argument) != ast.dump(other)]
            if operator is not None and len(rest) == 1:
                return ast.Compare(other, [operator()], rest)
        return node


class _Units(ast.NodeTransformer):
    """Leaves factors out of products that are demanded to be 1: ``a * (b - c) >= 2`` says no more than ``a >= 2``."""

    def __init__(self, codes: Iterable[str]) -> None:
        demands = [node for node in map(parsed, codes) if isinstance(node, ast.Compare)]
        self.factors = {
            ast.unparse(node.left)
            for node in demands
            if len(node.ops) == 1 and isinstance(node.ops[0], ast.Eq) and ast.unparse(node.comparators[0]) == "1"
        }

    def removed(self, node: ast.expr | None) -> ast.expr | None:
        """Return the expression without these factors; it is used up."""
        found = None if node is None else self.visit(node)
        return found if isinstance(found, ast.expr) else None

    def visit_BinOp(self, node: ast.BinOp) -> ast.AST:
        """Leave a factor out of one product, where it is such a factor."""
        if isinstance(node.op, ast.Mult):
            for factor, other in ((node.left, node.right), (node.right, node.left)):
                if ast.unparse(factor) in self.factors:
                    found: ast.AST = self.visit(other)
                    return found
        return self.generic_visit(node)


def _follows(node: ast.expr | None, kept: set[str]) -> bool:
    """Whether one of several alternatives holds always, or is demanded already."""
    alternatives = node.values if isinstance(node, ast.BoolOp) and isinstance(node.op, ast.Or) else []
    return any(_always(alternative) or ast.unparse(alternative) in kept for alternative in alternatives)


def _always(node: ast.expr | None) -> bool:
    """Whether a comparison holds for all sizes of 2 and more."""
    if not isinstance(node, ast.Compare) or len(node.ops) > 1:
        return False
    (left_low, left_high), (right_low, right_high) = _interval(node.left), _interval(node.comparators[0])
    operator = node.ops[0]
    if isinstance(operator, ast.NotEq):
        return left_low > right_high or left_high < right_low
    if isinstance(operator, ast.Gt | ast.GtE):
        return left_low > right_high or (isinstance(operator, ast.GtE) and left_low == right_high)
    if isinstance(operator, ast.Lt | ast.LtE):
        return left_high < right_low or (isinstance(operator, ast.LtE) and left_high == right_low)
    return False


def _interval(node: ast.expr) -> Interval:
    """Return bounds on the value of an expression over sizes of 2 and more."""
    if _is_size(node):
        return (2, math.inf)
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return (node.value, node.value)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("min", "max"):
        lows, highs = zip(*map(_interval, node.args), strict=True)
        return (min(lows), min(highs)) if node.func.id == "min" else (max(lows), max(highs))
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add | ast.Mult):
        (left_low, left_high), (right_low, right_high) = _interval(node.left), _interval(node.right)
        if isinstance(node.op, ast.Add):
            return (left_low + right_low, left_high + right_high)
        if left_low > 0 and right_low > 0:
            return (left_low * right_low, left_high * right_high)
    return _ANYTHING


def _is_size(node: ast.expr) -> bool:
    return _SIZE.fullmatch(ast.unparse(node)) is not None
