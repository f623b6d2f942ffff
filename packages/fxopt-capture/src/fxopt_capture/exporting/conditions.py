"""Read the conditions of a graph on its inputs from an exported program."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import sympy  # type: ignore[import-untyped]  # has no types; a dependency of torch
import torch
from torch.export import ExportedProgram
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from fxopt_capture._torch import assumptions
from fxopt_capture.call.guards import Condition, InputGuards, InputSpec
from fxopt_capture.exporting.inequalities import distinct, joined
from fxopt_core.errors import CaptureError
from fxopt_rewrite import dtype_kind


def read_guards(
    program: ExportedProgram, inputs: Mapping[str, object], values: Sequence[object], mode: bool | None
) -> InputGuards:
    """Return the guards of a program; ``values`` are ``meta["val"]`` of the placeholders of its inputs."""
    paths = [path for path, _ in pytree.tree_leaves_with_path(dict(inputs))]
    names = [f"{getattr(path[0], 'key', path[0])}{pytree.keystr(path[1:])}" for path in paths]
    specs = [_spec(name, value) for name, value in zip(names, values, strict=True)]
    conditions = [*relations(program.range_constraints, names, values), *_observed(program, paths, names)]
    return InputGuards(specs, joined(distinct(conditions)), mode)


def size_expression(size: object) -> sympy.Expr | None:
    """Return the symbolic expression of a dynamic size, or None for a static one."""
    if isinstance(size, torch.SymInt):
        expression: sympy.Expr = size.node.expr
        return None if expression.is_number else expression
    return None


def _spec(name: str, value: object) -> InputSpec:
    if not isinstance(value, torch.Tensor):
        return InputSpec(name, None, (), value)
    sizes = tuple(None if size_expression(size) is not None else int(size) for size in value.shape)
    return InputSpec(name, dtype_kind(value.dtype), sizes)


def dynamic_sizes(values: Sequence[object]) -> Iterator[tuple[int, int, sympy.Expr]]:
    """Yield input, dimension and expression of every dynamic size of the inputs."""
    for index, value in enumerate(values):
        if isinstance(value, torch.Tensor):
            for dimension, size in enumerate(value.shape):
                expression = size_expression(size)
                if expression is not None:
                    yield index, dimension, expression


def relations(ranges: Mapping[Any, Any], names: Sequence[str], values: Sequence[object]) -> Iterator[Condition]:
    """Yield the conditions that follow from sizes sharing a symbol, and from the ranges of the symbols.

    ``names`` and ``values`` are those of the flat inputs; a value is ``meta["val"]`` of the placeholder.
    """
    known: dict[sympy.Symbol, tuple[str, str]] = {}
    sizes = sorted(dynamic_sizes(values), key=lambda size: not size[2].is_symbol)  # plain symbols define
    for index, dimension, expression in sizes:
        code, text = f"i[{index}].size()[{dimension}]", f"{names[index]}.size()[{dimension}]"
        unknown = [symbol for symbol in expression.free_symbols if symbol not in known]
        if not unknown:
            yield Condition(
                f"{code} == {_printed(expression, known, 0)}", f"{text} == {_printed(expression, known, 1)}"
            )
        elif len(unknown) == 1:
            yield from _definition(expression, unknown[0], code, text, known)
            bounds = ranges.get(expression)
            if bounds is not None:
                yield from _bounds(bounds, code, text)


def _definition(
    expression: sympy.Expr, symbol: sympy.Symbol, code: str, text: str, known: dict[sympy.Symbol, tuple[str, str]]
) -> Iterator[Condition]:
    """Let a size define the symbol in its expression, ``a * symbol + b``, and yield the condition of divisibility."""
    factor = expression.coeff(symbol, 1)
    offset = sympy.expand(expression - factor * symbol)
    if not (factor.is_Integer and offset.is_Integer):
        return
    if (factor, offset) == (1, 0):
        known[symbol] = code, text
        return
    shifted = [f"({source} - ({offset}))" if offset else source for source in (code, text)]
    known[symbol] = f"({shifted[0]} // {factor})", f"({shifted[1]} // {factor})"
    yield Condition(f"{shifted[0]} % {factor} == 0", f"{shifted[1]} % {factor} == 0")


def _bounds(bounds: Any, code: str, text: str) -> Iterator[Condition]:
    # A lower bound of 2 is what torch.export assumes of every dynamic size, not what the graph relies on.
    if bounds.lower > 2:
        yield Condition(f"{code} >= {int(bounds.lower)}", f"{text} >= {int(bounds.lower)}")
    if bounds.upper.is_Integer and int(bounds.upper) < 2**62:
        yield Condition(f"{code} <= {int(bounds.upper)}", f"{text} <= {int(bounds.upper)}")


def _printed(expression: sympy.Expr, known: Mapping[sympy.Symbol, tuple[str, str]], form: int) -> str:
    symbols = {symbol: sympy.Symbol(known[symbol][form]) for symbol in expression.free_symbols}
    printed: str = PythonPrinter().doprint(expression.xreplace(symbols))
    return printed


def _observed(program: ExportedProgram, paths: Sequence[pytree.KeyPath], names: Sequence[str]) -> Iterator[Condition]:
    """Yield the guards that tracing the model has recorded."""
    sources = [(f"L{pytree.keystr(path)}", f"L['flat_args'][{index}]") for index, path in enumerate(paths)]
    for guard in assumptions(program):
        code = text = guard.replace("torch.sym_min(", "min(").replace("torch.sym_max(", "max(")  # so in torch 2.15
        for index, (source, flat) in enumerate(sources):
            for spelling in (source, flat):
                code = code.replace(spelling, f"i[{index}]")
                text = text.replace(spelling, names[index])
        if "L[" in code:
            raise CaptureError(
                f"the graph would be valid for inputs with {guard} only, and this says nothing about the inputs that "
                f"the model was captured with ({', '.join(names)}); give static `dynamic_shapes`"
            )
        yield Condition(code, text.replace("\n", " "))
