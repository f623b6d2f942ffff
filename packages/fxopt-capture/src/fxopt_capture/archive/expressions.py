"""The expressions that an archive may hold: sizes, as sympy writes them, and conditions on sizes, as Python does.

torch has sympy evaluate the first, and fxopt has Python run the second: both are read here before, by a grammar that
has numbers, sizes, arithmetic and comparisons, and nothing whose value takes long to compute.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from functools import lru_cache
from math import inf

from fxopt_capture.call.guards import Condition
from fxopt_core.errors import CaptureError

_LONGEST, _DEEPEST, _LARGEST, _TERMS = 20_000, 64, 1024.0, 400.0
_SYMBOL = re.compile(r"(?:s|u|zf|zuf)\d{1,5}")
_ASSUMPTIONS = frozenset({"positive", "integer", "nonnegative", "real", "finite", "nonzero", "zero", "negative"})
_NAMES = """
    Abs Add And CeilDiv CeilToInt CleanDiv Eq Equality FloatTrueDiv FloorDiv FloorToInt Ge GreaterThan Gt Identity
    IntTrueDiv IsNonOverlappingAndDenseIndicator Le LessThan Lt Max Min Mod ModularIndexing Mul Ne Not Or PythonMod
    RoundToInt StrictGreaterThan StrictLessThan ToFloat TruncToFloat TruncToInt Unequality Where
"""
_FUNCTIONS = frozenset(_NAMES.split())
_CHOICES = frozenset({"Max", "Min"})  # which sympy compares with each other, two and two
_SUMS = frozenset({"Add", "Mul", "Identity"})  # what is multiplied out; other functions are one factor
_POWERS = frozenset({"FloatPow", "Pow", "PowByNatural"})
_NUMBERS = frozenset({"Float", "Integer", "Rational"})
_TRUTHS = frozenset({"true", "false", "True", "False"})
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod, ast.Pow)
_COMPARISONS = (ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE)

Bounds = tuple[float, float]
"""The bits that a value can have, where a size has 63, and the terms of the sum that multiplying it out gives."""


class _Refused(Exception):
    """An expression is none of the grammar."""


def _parsed(text: str) -> ast.expr:
    depth = deepest = 0
    for character in text[: _LONGEST + 1]:
        depth += (character in "([") - (character in ")]")
        deepest = max(deepest, depth)
    if len(text) > _LONGEST or deepest > _DEEPEST or not text.isascii():
        raise _Refused
    return ast.parse(text, mode="eval").body


def _bounded(bounds: Bounds) -> Bounds:
    if bounds[0] > _LARGEST or bounds[1] > _TERMS:
        raise _Refused
    return bounds


def _joined(parts: list[Bounds], *, multiplied: bool) -> Bounds:
    bits = sum(part[0] for part in parts) if multiplied else max((part[0] for part in parts), default=0.0) + len(parts)
    terms = 1.0 if multiplied else 0.0
    for part in parts:
        terms = terms * part[1] if multiplied else terms + part[1]
    return _bounded((bits, terms))


def _power(base: Bounds, exponent: ast.expr) -> Bounds:
    """Return the bounds of a power, whose exponent is a small number."""
    sign = isinstance(exponent, ast.UnaryOp) and isinstance(exponent.op, ast.USub)
    number = exponent.operand if isinstance(exponent, ast.UnaryOp) and sign else exponent
    if isinstance(number, ast.Call) and isinstance(number.func, ast.Name) and number.func.id in _NUMBERS:
        return _power(base, number.args[0]) if len(number.args) == 1 else _bounded((base[0], base[1]))
    value = number.value if isinstance(number, ast.Constant) else inf
    if type(value) not in (int, float) or not abs(float(value)) <= 16:  # type: ignore[arg-type]  # a number then
        raise _Refused
    times = max(1.0, abs(float(value)))  # type: ignore[arg-type]  # as above
    return _bounded((base[0] * times, base[1] ** times))


def _named(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else ""


class _Grammar:
    """What both kinds of expressions have in common."""

    def bounds(self, node: ast.expr) -> Bounds:
        if isinstance(node, ast.Constant):
            return self._constant(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd | ast.Not):
            return self.bounds(node.operand)
        if isinstance(node, ast.BinOp) and isinstance(node.op, _OPERATORS):
            if isinstance(node.op, ast.Pow):
                return _power(self.bounds(node.left), node.right)
            sides = [self.bounds(node.left), self.bounds(node.right)]
            return _joined(sides, multiplied=isinstance(node.op, ast.Mult | ast.Div))
        if isinstance(node, ast.Compare) and all(isinstance(op, _COMPARISONS) for op in node.ops):
            return _joined([self.bounds(side) for side in (node.left, *node.comparators)], multiplied=False)
        return self.own(node)

    def own(self, node: ast.expr) -> Bounds:
        raise _Refused

    def _constant(self, value: object) -> Bounds:
        if isinstance(value, int) and value.bit_length() < 64:
            return float(value.bit_length()), 1.0
        if isinstance(value, float):
            return 63.0, 1.0
        raise _Refused


class _Sizes(_Grammar):
    """``Add(Mul(Integer(2), Symbol('s0', positive=True, integer=True)), Integer(-1))``, ``2*s0 - 1``."""

    def own(self, node: ast.expr) -> Bounds:
        if isinstance(node, ast.Name) and (_SYMBOL.fullmatch(node.id) or node.id in _TRUTHS):
            return 63.0, 1.0
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
            raise _Refused
        name, keywords = node.func.id, {each.arg: each.value for each in node.keywords}
        values = [each.value if isinstance(each, ast.Constant) else None for each in keywords.values()]
        if name == "Symbol":
            (given,) = node.args
            is_name = isinstance(given, ast.Constant) and isinstance(given.value, str)
            if not (is_name and _SYMBOL.fullmatch(str(given.value)) and keywords.keys() <= _ASSUMPTIONS):  # type: ignore[attr-defined]  # a constant
                raise _Refused
            if not all(isinstance(value, bool) for value in values):
                raise _Refused
            return 63.0, 1.0
        if name == "Float":
            number, *_ = (each.value if isinstance(each, ast.Constant) else None for each in node.args)
            precise = keywords.keys() <= {"precision"} and all(value == 53 for value in values)
            if not (
                precise and len(node.args) == 1 and isinstance(number, str | float | int) and len(str(number)) < 40
            ):
                raise _Refused
            float(number)
            return 63.0, 1.0
        if keywords:
            raise _Refused
        if name in _POWERS:
            base, exponent = node.args
            return _power(self.bounds(base), exponent)
        if name not in _FUNCTIONS | _NUMBERS:
            raise _Refused
        if name in _CHOICES:
            bits, terms = self._choice(node)
            _bounded((bits, terms**2))
            return bits, 1.0
        bits, terms = _joined([self.bounds(each) for each in node.args], multiplied=name == "Mul")
        return bits, terms if name in _SUMS else 1.0

    def _choice(self, node: ast.expr) -> Bounds:
        """Return the bounds of what a choice compares, with choices among its arguments, which sympy makes one of."""
        if not isinstance(node, ast.Call) or _named(node.func) not in _CHOICES:
            return self.bounds(node)
        if node.keywords:
            raise _Refused
        return _joined([self._choice(each) for each in node.args], multiplied=False)


@lru_cache(maxsize=4096)
def is_size_expression(text: str) -> bool:
    """Return whether a text is arithmetic on sizes as sympy writes it, or a comparison.

    >>> is_size_expression("Mul(Integer(4), Symbol('s27', positive=True))"), is_size_expression("2*s0 + 1")
    (True, True)
    >>> is_size_expression("__import__('os').getcwd()"), is_size_expression("Pow(Integer(10), Integer(10**9))")
    (False, False)
    """
    return _is(text, _Sizes())


_CALLS = frozenset({"min", "max", "abs", "int", "float", "round", "IsNonOverlappingAndDenseIndicator"})
_METHODS = frozenset({"size", "stride", "storage_offset"})
_MODULES = {
    "math": frozenset({"ceil", "fabs", "floor", "sqrt", "trunc"}),
    "torch": frozenset({"sym_float", "sym_int", "sym_ite", "sym_max", "sym_min", "sym_not", "_sym_sqrt", "sym_sqrt"}),
}


class _Conditions(_Grammar):
    """``i[0].size()[1] <= 64``."""

    def own(self, node: ast.expr) -> Bounds:
        if isinstance(node, ast.BoolOp):
            return _joined([self.bounds(value) for value in node.values], multiplied=False)
        if isinstance(node, ast.IfExp):
            return _joined([self.bounds(each) for each in (node.test, node.body, node.orelse)], multiplied=False)
        if isinstance(node, ast.Subscript) and self._is_number(node.slice):
            is_input = isinstance(node.value, ast.Name) and node.value.id == "i"
            return (63.0, 1.0) if is_input else self._method(node.value)
        if isinstance(node, ast.Call) and not node.keywords and isinstance(node.func, ast.Attribute):
            owner = node.func.value
            if isinstance(owner, ast.Name) and node.func.attr in _MODULES.get(owner.id, ()):
                return _joined([self.bounds(each) for each in node.args], multiplied=False)
            return self._method(node)
        if isinstance(node, ast.Call) and not node.keywords and _named(node.func) in _CALLS:
            return _joined([self.bounds(each) for each in node.args], multiplied=False)
        raise _Refused

    def _method(self, node: ast.expr) -> Bounds:
        """Read ``i[0].size()``, ``i[0].stride(1)`` or ``i[0].storage_offset()``."""
        if not isinstance(node, ast.Call) or node.keywords or not isinstance(node.func, ast.Attribute):
            raise _Refused
        if node.func.attr not in _METHODS or not all(map(self._is_number, node.args)):
            raise _Refused
        if not isinstance(node.func.value, ast.Subscript):
            raise _Refused
        return self.own(node.func.value)

    @staticmethod
    def _is_number(node: ast.expr) -> bool:
        number = node.operand if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub) else node
        return isinstance(number, ast.Constant) and type(number.value) is int


def _is(text: str, grammar: _Grammar) -> bool:
    try:
        grammar.bounds(_parsed(text))
    except (_Refused, SyntaxError, ValueError, TypeError, OverflowError, RecursionError, MemoryError):
        return False
    return True


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
        if not _is(condition.code, _Conditions()):
            raise CaptureError(
                f"the program demands `{condition.code:.200}` of its inputs, which is no comparison of sizes; the "
                f"archive was not written by torch.export, or by a version that writes other conditions"
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
