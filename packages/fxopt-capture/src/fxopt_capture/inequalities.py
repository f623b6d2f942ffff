"""Relations between sizes, as short as they can be said: ``a - b <= 0`` and ``b <= a`` are ``a == b``."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from .guards import Condition


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


def _reversed(code: str) -> str:
    left, operator, right = code.partition(" <= ")
    return f"{right} <= {left}" if operator and left != right else ""


def _negated(node: ast.expr) -> ast.expr | None:
    """Return ``x`` for ``-1 * x``."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult) and ast.unparse(node.left) == "-1":
        return node.right
    return None
