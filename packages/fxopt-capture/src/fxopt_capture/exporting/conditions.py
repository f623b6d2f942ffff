"""Read the conditions of a graph on its inputs from an exported program."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import sympy  # type: ignore[import-untyped]  # has no types; a dependency of torch
import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree
from torch.utils._sympy.printers import PythonPrinter

from fxopt_capture._torch import assumptions
from fxopt_capture.call.guards import InputGuards, InputSpec
from fxopt_capture.exporting.inequalities import distinct, joined
from fxopt_core.errors import CaptureError
from fxopt_rewrite import dtype_kind

aten = torch.ops.aten
_SQUEEZES = [getattr(each, name) for each in (aten.squeeze, aten.squeeze_) for name in ("default", "dim", "dims")]


def read_guards(
    program: ExportedProgram,
    inputs: Mapping[str, object],
    values: Sequence[object],
    mode: bool | None,
    known: Mapping[str, torch.Tensor],
) -> InputGuards:
    """Return the guards of a program.

    Args:
        values: ``meta["val"]`` of the placeholders of its inputs.
        known: the inputs whose values the model has read, by name.
    """
    paths = [path for path, _ in pytree.tree_leaves_with_path(dict(inputs))]
    names = [f"{getattr(path[0], 'key', path[0])}{pytree.keystr(path[1:])}" for path in paths]
    specs = [_spec(name, value) for name, value in zip(names, values, strict=True)]
    for place, spec in enumerate(specs):
        if (value := known.get(spec.name)) is not None:
            specs[place] = replace(spec, value=tuple(value.flatten().tolist()), dtype=value.dtype)
    conditions = [*_relations(program.range_constraints, values, {}), *_observed(program, paths, names)]
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


def _relations(ranges: Mapping[Any, Any], values: Sequence[object], known: dict[sympy.Symbol, str]) -> Iterator[str]:
    """Yield the conditions that follow from sizes sharing a symbol, and from the ranges of the symbols.

    In `known`, each symbol gets its value as code.
    """
    sizes = sorted(dynamic_sizes(values), key=lambda size: not size[2].is_symbol)  # plain symbols define
    for index, dimension, expression in sizes:
        code = f"i[{index}].size()[{dimension}]"
        unknown = [symbol for symbol in expression.free_symbols if symbol not in known]
        if not unknown:
            yield f"{code} == {_code_of(expression, known)}"
        elif len(unknown) == 1:
            yield from _definition(expression, unknown[0], code, known)
            if expression in ranges:
                lower, upper = ranges[expression].lower, ranges[expression].upper
                # A lower bound of 2 is what torch.export assumes of every dynamic size, not what the graph relies on.
                if lower > 2:
                    yield f"{code} >= {int(lower)}"
                if upper.is_Integer and int(upper) < 2**62:
                    yield f"{code} <= {int(upper)}"


def _code_of(expression: sympy.Expr, known: Mapping[sympy.Symbol, str]) -> str:
    symbols = {symbol: sympy.Symbol(known[symbol]) for symbol in expression.free_symbols}
    code: str = PythonPrinter().doprint(expression.xreplace(symbols))
    return code


def squeezed(module: GraphModule, values: Sequence[object]) -> Iterator[str]:
    """Yield that a dynamic size is not 1 where `squeeze` would then drop it; an export for small sizes has no guard.

    Args:
        module: the exported model.
        values: ``meta["val"]`` of the placeholders of its inputs.
    """
    known: dict[sympy.Symbol, str] = {}
    list(_relations({}, values, known))
    graphs = [each.graph for each in module.modules() if isinstance(each, GraphModule)]
    for graph, target in itertools.product(graphs, _SQUEEZES):
        for node in graph.find_nodes(op="call_function", target=target):
            sizes = node.args[0].meta["val"].shape
            dims = pytree.tree_leaves(node.args[1]) if len(node.args) > 1 else range(len(sizes))
            for expression in (size_expression(sizes[dim]) for dim in dims if sizes):
                if expression is not None and known.keys() >= expression.free_symbols:
                    yield f"{_code_of(expression, known)} != 1"


def _definition(
    expression: sympy.Expr, symbol: sympy.Symbol, code: str, known: dict[sympy.Symbol, str]
) -> Iterator[str]:
    """Let a size define the symbol in its expression, ``a * symbol + b``, and yield the condition of divisibility."""
    factor = expression.coeff(symbol, 1)
    offset = sympy.expand(expression - factor * symbol)
    if not (factor.is_Integer and offset.is_Integer):
        return
    if (factor, offset) == (1, 0):
        known[symbol] = code
        return
    shifted = f"({code} - ({offset}))" if offset else code
    known[symbol] = f"({shifted} // {factor})"
    yield f"{shifted} % {factor} == 0"


def _observed(program: ExportedProgram, paths: Sequence[pytree.KeyPath], names: Sequence[str]) -> Iterator[str]:
    """Yield the guards that tracing the model has recorded."""
    for guard in assumptions(program):
        code = guard.replace("torch.sym_min(", "min(").replace("torch.sym_max(", "max(")  # so in torch 2.15
        for index, path in enumerate(paths):
            # torch names an input by its path in the arguments, or, as its tracer does, by its place among all leaves.
            for spelling in (f"L{pytree.keystr(path)}", f"L['flat_args'][{index}]"):
                code = code.replace(spelling, f"i[{index}]")
        if "L[" in code:
            raise CaptureError(
                f"the graph would be valid for inputs with {guard} only, and this does not refer to the inputs that "
                f"the model was captured with ({', '.join(names)}); give static `dynamic_shapes`"
            )
        yield code.replace("\n", " ")
