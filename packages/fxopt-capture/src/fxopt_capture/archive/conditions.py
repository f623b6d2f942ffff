"""Check that conditions read from a file are comparisons of sizes, before Python runs them."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from fxopt_capture.call.guards import Condition
from fxopt_core.errors import CaptureError

_CALLS = frozenset({"min", "max", "abs", "int", "float", "round", "IsNonOverlappingAndDenseIndicator"})
_METHODS = frozenset({"size", "stride", "storage_offset"})
_EXPRESSIONS = (
    ast.Expression, ast.BoolOp, ast.And, ast.Or, ast.UnaryOp, ast.Not, ast.USub, ast.UAdd, ast.BinOp, ast.operator,
    ast.Compare, ast.cmpop, ast.Constant, ast.Subscript, ast.Load, ast.IfExp,
)  # fmt: skip


def check_conditions(conditions: Iterable[Condition]) -> None:
    """Check that conditions are arithmetic on sizes of the inputs ``i``.

    Raises:
        CaptureError: one of them is something else.

    >>> check_conditions([Condition("i[0].size()[1] <= 64", "")])
    >>> check_conditions([Condition("__import__('os')", "")])
    Traceback (most recent call last):
    fxopt_core.errors.CaptureError: the program demands `__import__('os')` of its inputs, which is no comparison of...
    """
    for condition in conditions:
        if not _is_safe(condition.code):
            raise CaptureError(
                f"the program demands `{condition.code}` of its inputs, which is no comparison of sizes; the archive "
                f"was not written by torch.export, or by a version that writes other conditions"
            )


def normal_form(code: str) -> object:
    """Return what is equal for conditions that are spelt differently: spaces, parentheses, sides of an equation.

    >>> normal_form("(i[0].size()[0]*2) == 4") == normal_form("4 == i[0].size()[0] * 2")
    True
    """
    tree = ast.parse(code, mode="eval").body
    if isinstance(tree, ast.Compare) and len(tree.ops) == 1 and isinstance(tree.ops[0], ast.Eq):
        return frozenset(map(ast.unparse, (tree.left, tree.comparators[0])))
    return ast.unparse(tree)


def _is_safe(code: str) -> bool:
    try:
        tree = ast.parse(code, mode="eval")
    except (SyntaxError, ValueError, RecursionError):
        return False
    return _safe(tree)


def _safe(node: ast.AST) -> bool:
    if isinstance(node, ast.Name):
        return node.id == "i"
    if isinstance(node, ast.Call):
        return not node.keywords and _callable(node.func) and all(map(_safe, node.args))
    return isinstance(node, _EXPRESSIONS) and all(map(_safe, ast.iter_child_nodes(node)))


def _callable(function: ast.expr) -> bool:
    if isinstance(function, ast.Attribute):
        if isinstance(function.value, ast.Name) and function.value.id in ("math", "torch"):
            return function.value.id == "math" or function.attr.startswith(("sym_", "_sym_"))
        return function.attr in _METHODS and _safe(function.value)
    return isinstance(function, ast.Name) and function.id in _CALLS
