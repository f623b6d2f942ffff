"""Descriptions of the values of nodes as data: shapes, dtypes and strides, with dynamic sizes as expressions.

They restore ``node.meta["val"]`` of a capture without running the graph on fake tensors.
"""

from __future__ import annotations

import ast
import math
from functools import reduce
from typing import Any

import sympy  # type: ignore[import-untyped]  # has no types; a dependency of torch
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._sympy.printers import PythonPrinter

from fxopt_capture._torch import FreeSizes, no_dispatch, size_range
from fxopt_capture.archive.arithmetic import is_arithmetic
from fxopt_rewrite import Form, MalformedError

_TOO_LARGE = 1 << 62
_ATOMS = (bool, int, float, str, type(None))
#: The functions that torch writes into sizes. Python's ``max`` would compare symbolic sizes, and so decide once and for
#: all which of them is larger.
_FOLDED: Any = {"max": lambda *each: reduce(torch.sym_max, each), "min": lambda *each: reduce(torch.sym_min, each)}
_NAMES: Any = {"__builtins__": {}, "torch": torch, "math": math, "round": round, "abs": abs, **_FOLDED}


class _Unknown(Exception):
    """A value is left out."""


class ShapeWriter:
    """Writes ``meta["val"]`` of one graph's nodes, and numbers its shapes and dynamic sizes."""

    def __init__(self) -> None:
        self._shapes: dict[tuple[Any, ...], int] = {}
        self._symbols: dict[Any, tuple[str, list[int | None]]] = {}

    def form(self, value: object) -> Form | None:
        """Return a value as data, in a list of one; None if data cannot express a part of it."""
        try:
            return [self._form(value)]
        except _Unknown:
            return None

    def tables(self) -> Form:
        """Return the shapes and sizes that forms refer to."""
        return {"shapes": [list(key) for key in self._shapes], "sizes": [*self._symbols.values()]}

    def _form(self, value: Any) -> Form:
        if isinstance(value, torch.Tensor):
            if value.layout != torch.strided or value.is_nested or value.is_quantized:
                raise _Unknown
            sizes, strides = (tuple(map(self._size, each)) for each in (value.shape, value.stride()))
            key = str(value.dtype).removeprefix("torch."), sizes, strides, str(value.device)
            return {"tensor": self._shapes.setdefault(key, len(self._shapes))}
        if isinstance(value, torch.SymInt):
            return {"size": self._size(value)}
        if isinstance(value, list | tuple) and type(value) in (list, tuple, torch.Size):
            return {"list" if isinstance(value, list) else "tuple": [self._form(item) for item in value]}
        # JSON has neither NaN, which is not equal to itself, nor infinity.
        if type(value) in _ATOMS and value == value and value not in (float("inf"), float("-inf")):
            return value
        raise _Unknown

    def _size(self, size: int | torch.SymInt) -> int | str:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        for symbol in sorted(expression.free_symbols, key=str):
            if symbol not in self._symbols:
                self._symbols[symbol] = f"s{len(self._symbols)}", size_range(size.node.shape_env, symbol)
        names = {symbol: sympy.Symbol(self._symbols[symbol][0], integer=True) for symbol in expression.free_symbols}
        text = str(PythonPrinter().doprint(expression.xreplace(names)))
        known = {symbol.name for symbol in names.values()}
        if not is_arithmetic(text, lambda node: isinstance(node, ast.Name) and node.id in known):
            raise _Unknown
        return text


class ShapeReader:
    """Reads what `ShapeWriter` has written."""

    def __init__(self, tables: Form) -> None:
        self._sizes: dict[str, Any] = {}
        self._values: dict[str, Any] = {}
        free = FreeSizes()
        for name, bounds in tables["sizes"]:
            if not all(type(bound) is int for bound in bounds if bound is not None) or len(bounds) != 3:
                raise MalformedError(f"{bounds!r:.60} is not a range of sizes")
            self._sizes[str(name)] = free.new(*bounds)
        self._mode = FakeTensorMode(shape_env=free.env, allow_non_fake_inputs=True)
        self._shapes = tables["shapes"]
        self._made: dict[int, tuple[torch.Tensor, torch.device]] = {}

    def value(self, form: Form) -> Any:
        """Return the value of a form, as a new object without memory."""
        (content,) = form
        return self._value(content)

    def _value(self, form: Form) -> Any:
        if not isinstance(form, dict):
            if type(form) not in _ATOMS:
                raise MalformedError(f"{form!r:.60} is not the value of a node")
            return form
        ((kind, content),) = form.items()
        if kind == "tensor":
            element, device = self._element(content)
            with no_dispatch():
                return FakeTensor(self._mode, element.detach(), device)
        if kind == "size":
            is_negative = type(content) is int and -_TOO_LARGE < content < 0  # of padding, or an offset
            return content if is_negative else self._size(content)
        found = [self._value(item) for item in content]
        return found if kind == "list" else tuple(found)

    def _element(self, number: int) -> tuple[torch.Tensor, torch.device]:
        if number not in self._made:
            name, sizes, strides, device = self._shapes[number]
            dtype = getattr(torch, name, None)
            if not isinstance(dtype, torch.dtype):
                raise MalformedError(f"{name!r:.40} is not a dtype")
            shape, steps = [self._size(size) for size in sizes], [self._size(stride) for stride in strides]
            with no_dispatch():
                element = torch.empty_strided(shape, steps, dtype=dtype, device="meta")
            self._made[number] = element, torch.device(device)
        return self._made[number]

    def _size(self, size: int | str) -> Any:
        if type(size) is int and 0 <= size < _TOO_LARGE:
            return size
        if not isinstance(size, str):
            raise MalformedError(f"{size!r:.60} is not a size")
        if size not in self._values:
            if not is_arithmetic(size, lambda node: isinstance(node, ast.Name) and node.id in self._sizes):
                raise MalformedError(f"{size!r:.60} is not arithmetic on sizes")
            self._values[size] = eval(size, {**_NAMES, **self._sizes})
        return self._values[size]
