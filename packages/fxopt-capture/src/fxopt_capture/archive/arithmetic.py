"""Texts of an archive that Python evaluates: conditions on the sizes of inputs, and sizes as expressions of others.

Both are checked first: they may contain numbers, sizes, arithmetic and comparisons, and nothing that takes long to
compute.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import Any

from fxopt_core.errors import CaptureError

_LONGEST, _LARGEST_POWER = 20_000, 16
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)
#: The functions that torch writes into guards and sizes.
_CALLS = frozenset({"min", "max", "abs", "int", "float", "round", "IsNonOverlappingAndDenseIndicator"})
_OF_MODULES = {
    "math": frozenset({"ceil", "fabs", "floor", "sqrt", "trunc"}),
    "torch": frozenset({"sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "_sym_sqrt", "sym_sqrt"}),
}
_METHODS = frozenset({"size", "stride", "storage_offset"})
IsLeaf = Callable[[ast.expr], bool]


def is_arithmetic(text: str, is_leaf: IsLeaf) -> bool:
    """Return whether a text is arithmetic on leaves and numbers, or a comparison, that is computed at once.

    >>> is_arithmetic("2*s0 + 1", lambda node: ast.unparse(node) == "s0")
    True
    >>> is_arithmetic("__import__('os')", lambda node: False), is_arithmetic("9**9**9", lambda node: False)
    (False, False)
    """
    try:
        return len(text) <= _LONGEST and text.isascii() and _fits(ast.parse(text, mode="eval").body, is_leaf, True)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False


def _fits(node: ast.expr, is_leaf: IsLeaf, may_raise: bool) -> bool:
    """Return whether a node follows the grammar; the base of a power must not contain another power."""
    if is_leaf(node):
        return True
    parts: list[ast.expr]
    match node:
        case ast.Constant(value=int() | float() as number):
            return isinstance(number, float) or number.bit_length() < 64
        case ast.UnaryOp(op=ast.USub() | ast.UAdd() | ast.Not(), operand=operand):
            parts = [operand]
        case ast.BinOp(left=base, op=ast.Pow(), right=exponent):
            given = exponent.operand if isinstance(exponent, ast.UnaryOp) else exponent
            power: Any = given.value if isinstance(given, ast.Constant) else None
            small = type(power) in (int, float) and abs(power) <= _LARGEST_POWER
            return may_raise and small and _fits(base, is_leaf, False)
        case ast.BinOp(left=left, op=operator, right=right) if isinstance(operator, _OPERATORS):
            parts = [left, right]
        case ast.Compare(left=left, ops=operators, comparators=others) if all(
            isinstance(each, _COMPARISONS) for each in operators
        ):
            parts = [left, *others]
        case ast.BoolOp(values=parts):
            pass
        case ast.IfExp(test=test, body=body, orelse=orelse):
            parts = [test, body, orelse]
        case ast.Call(func=ast.Name(id=name), args=parts, keywords=[]) if name in _CALLS:
            pass
        case ast.Call(func=ast.Attribute(value=ast.Name(id=owner), attr=name), args=parts, keywords=[]):
            if name not in _OF_MODULES.get(owner, ()):
                return False
        case _:
            return False
    return all(_fits(part, is_leaf, may_raise) for part in parts)


def is_size_of_input(node: ast.expr) -> bool:
    """Return whether a node reads the inputs: ``i[0]``, ``i[0].size()[1]``, ``i[0].stride(1)``."""
    match node:
        case ast.Subscript(value=ast.Name(id="i"), slice=index):
            return _is_index(index)
        case ast.Subscript(value=ast.Call() as call, slice=index):
            return _is_index(index) and is_size_of_input(call)
        case ast.Call(func=ast.Attribute(value=ast.Subscript() as owner, attr=name), args=args, keywords=[]):
            return name in _METHODS and is_size_of_input(owner) and all(map(_is_index, args))
    return False


def _is_index(node: ast.expr) -> bool:
    number = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
    return isinstance(number, ast.Constant) and type(number.value) is int


def check_conditions(conditions: Iterable[str]) -> None:
    """Check that conditions are arithmetic on sizes of the inputs ``i``.

    Raises:
        CaptureError: one of them is something else.

    >>> check_conditions(["i[0].size()[1] <= 64"])
    >>> check_conditions(["__import__('os')"])
    Traceback (most recent call last):
    fxopt_core.errors.CaptureError: the graph demands `__import__('os')` of its inputs, which does not compare sizes
    """
    for condition in conditions:
        if not is_arithmetic(condition, is_size_of_input):
            raise CaptureError(f"the graph demands `{condition:.200}` of its inputs, which does not compare sizes")
