"""Relations between sizes, as short as they can be said: ``a - b <= 0`` and ``b <= a`` are ``a == b``."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable

from .guards import Condition

Place = tuple[int, int]  # input, dimension

_SIZE = re.compile(r"i\[(\d+)\]\.size\(\)\[(\d+)\]")


def joined(conditions: Iterable[Condition]) -> list[Condition]:
    """Return the same conditions, with differences compared to zero and pairs of inequalities in fewer words.

    >>> a, b = "i[0].size()[1]", "i[1].size()[1]"
    >>> codes = [f"{a} + ((-1)*{b}) <= 0", f"{a} > 1", f"{b} <= {a}"]
    >>> [condition.code for condition in joined(Condition(code, code) for code in codes)]
    ['i[0].size()[1] == i[1].size()[1]', 'i[0].size()[1] > 1']
    """
    plain = [
        Condition(without_difference(condition.code), without_difference(condition.text)) for condition in conditions
    ]
    codes = {condition.code: condition for condition in plain}
    found: dict[str, Condition] = {}
    for condition in plain:
        opposite = codes.get(_reversed(condition.code))
        if opposite is None:
            found[condition.code] = condition
        elif opposite.code not in found:
            found[condition.code] = Condition(
                *(text.replace(" <= ", " == ") for text in (condition.code, condition.text))
            )
    return list(found.values())


def without_difference(source: str) -> str:
    """Return ``a <= b`` for ``a + -1 * b <= 0``, and any other expression as it is."""
    node = parsed(source)
    if not isinstance(node, ast.Compare) or len(node.ops) > 1 or not isinstance(node.ops[0], ast.LtE):
        return source
    bound = node.comparators[0]
    if not (isinstance(bound, ast.Constant) and bound.value == 0):
        return source
    if not (isinstance(node.left, ast.BinOp) and isinstance(node.left.op, ast.Add)):
        return source
    for term, other in ((node.left.left, node.left.right), (node.left.right, node.left.left)):
        negated = _negated(term)
        if negated is not None:
            return f"{ast.unparse(other)} <= {ast.unparse(negated)}"
    return source


def parsed(source: str) -> ast.expr | None:
    """Return an expression, or None where it is none of Python: the name of an input need not be one."""
    try:
        return ast.parse(source, mode="eval").body
    except SyntaxError:
        return None


def dependence(code: str) -> tuple[Place, Place, int] | None:
    """Read ``a == b + 1``: which two sizes it is about, and how much larger the first is; None for all else.

    >>> dependence("1 + i[0].size()[2] == i[1].size()[1]")
    ((0, 2), (1, 1), -1)
    """
    node = parsed(code)
    if not isinstance(node, ast.Compare) or len(node.ops) > 1 or not isinstance(node.ops[0], ast.Eq):
        return None
    left, right = _shifted(node.left), _shifted(node.comparators[0])
    return None if left is None or right is None else (left[0], right[0], right[1] - left[1])


def _shifted(node: ast.expr) -> tuple[Place, int] | None:
    """Read a size with a number added to it."""
    if match := _SIZE.fullmatch(ast.unparse(node)):
        return (int(match[1]), int(match[2])), 0
    if not isinstance(node, ast.BinOp) or not isinstance(node.op, ast.Add | ast.Sub):
        return None
    sign = 1 if isinstance(node.op, ast.Add) else -1
    for size, number in ((node.left, node.right), (node.right, node.left))[: 1 + (sign > 0)]:
        inner, value = _shifted(size), _number(number)
        if inner is not None and value is not None:
            return inner[0], inner[1] + sign * value
    return None


def _number(node: ast.expr) -> int | None:
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _number(node.operand)
        return None if value is None else -value
    return node.value if isinstance(node, ast.Constant) and type(node.value) is int else None


def _reversed(code: str) -> str:
    left, operator, right = code.partition(" <= ")
    return f"{right} <= {left}" if operator and left != right else ""


def _negated(node: ast.expr) -> ast.expr | None:
    """Return ``x`` for ``-1 * x``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and ast.unparse(node.left) == "-1":
        return node.right
    return None
