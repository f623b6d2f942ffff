"""Pickling what else `ExportedProgram.module()` hangs on a graph module: input checks, hooks, refused modes.

torch keeps the expected sizes in the `val` of the placeholders, which no pickle carries, and uses local functions. Here
the sizes become data, integers and sympy expressions, and each function gets a counterpart of the same effect.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType, MethodType
from typing import Any, NoReturn, TypeAlias

import torch
from torch import Tensor, nn
from torch._export.utils import get_keystr
from torch.fx import Graph, Node

Size: TypeAlias = Any
"""An int, or a sympy expression over the symbols of the module's range constraints."""


@dataclass(frozen=True)
class Expected:
    """What one flat input has to be: a tensor of these sizes, a size itself, a constant, or (all None) anything."""

    sizes: tuple[Size, ...] | None = None
    size: Size = None
    constant: int | float | str | None = None


@dataclass(frozen=True)
class InputChecks:
    """A forward pre-hook that refuses the inputs that torch's own hook on an exported module refuses."""

    inputs: tuple[Expected, ...]

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Check the inputs of a call.

        Raises:
            ValueError: they have another structure than those of the export.
            RuntimeError: a size or a constant is not what the graph was exported for.
        """
        from torch.export._unlift import _check_inputs_match  # a second of imports, which only this needs

        if not module.validate_inputs:
            return
        flat = _check_inputs_match(args, kwargs, module._in_spec)
        if hasattr(module, "_guards_fn") or torch.compiler.is_dynamo_compiling():
            return
        if len(flat) != len(self.inputs):
            raise RuntimeError(f"Unexpected number of inputs (expected {len(self.inputs)}, got {len(flat)})")
        sizes = _Sizes(module.range_constraints)
        for (path, found), expected in zip(flat, self.inputs, strict=True):
            _check(expected, found, get_keystr(path), sizes)


def hook_counterpart(hook: object, graph: Graph) -> object:
    """Return a hook of the same effect that pickles for one of torch's own; any other hook is returned itself."""
    if not isinstance(hook, FunctionType) or hook.__module__ != "torch.export._unlift":
        return hook
    if hook.__qualname__ == "_check_input_constraints_pre_hook":
        return InputChecks(tuple(_expected(node) for node in graph.find_nodes(op="placeholder")))
    if hook.__qualname__ == "_create_stateful_graph_module.<locals>.<lambda>":
        types = dict(zip(hook.__code__.co_freevars, hook.__closure__ or (), strict=True))["module_types"].cell_contents
        entering = "_enter_enable_graph_inputs_of_type_nn_module" in hook.__code__.co_names
        return ModulesAsInputs(frozenset(types), entering)
    return hook


@dataclass(frozen=True)
class ModulesAsInputs:
    """A hook that lets modules be inputs while the graph runs (entering), or ends that."""

    types: frozenset[type[nn.Module]]
    entering: bool

    def __call__(self, *_: object, **__: object) -> None:
        """Register or deregister the types."""
        from torch._export import non_strict_utils as torch_export  # imports sympy, which only this needs

        if self.entering:
            torch_export._enter_enable_graph_inputs_of_type_nn_module(set(self.types))
        else:
            torch_export._exit_enable_graph_inputs_of_type_nn_module(set(self.types))


def refuse_train(self: nn.Module, mode: bool = True) -> NoReturn:
    """Stand in for `train` of an exported module, whose graph is fixed to one mode."""
    raise NotImplementedError("Calling train() is not supported yet.")


def refuse_eval(self: nn.Module, mode: bool = True) -> NoReturn:
    """Stand in for `eval` of an exported module, whose graph is fixed to one mode."""
    raise NotImplementedError("Calling eval() is not supported yet.")


_REFUSED = {
    "ExportedProgram.module.<locals>._train": refuse_train,
    "ExportedProgram.module.<locals>._eval": refuse_eval,
}


def function_counterpart(method: MethodType) -> Any:
    """Return the function of a bound method, or one of the same effect that pickles."""
    return _REFUSED.get(getattr(method.__func__, "__qualname__", ""), method.__func__)


def _expected(placeholder: Node) -> Expected:
    value = placeholder.meta.get("val")
    if isinstance(value, Tensor):
        return Expected(sizes=tuple(map(_size, value.shape)))
    if isinstance(value, (int, float, str)):
        return Expected(constant=value)
    return Expected(size=_size(value)) if isinstance(value, torch.SymInt) else Expected()


def _size(size: Any) -> Size:
    expression = size.node.expr if isinstance(size, torch.SymInt) else size
    return int(expression) if isinstance(expression, int) or expression.is_number else expression


def _check(expected: Expected, found: Any, where: str, sizes: _Sizes) -> None:
    if expected.sizes is not None:
        if not isinstance(found, Tensor):
            raise RuntimeError(f"Expected input at {where} to be a tensor, but got {type(found)}")
        if len(expected.sizes) != found.dim():
            raise RuntimeError(
                f"Unexpected number of dimensions in input at {where}.shape "
                f"(expected {list(expected.sizes)}, got {list(found.shape)})"
            )
        for dim, (size, actual) in enumerate(zip(expected.sizes, found.shape, strict=True)):
            sizes.check(size, actual, f"{where}.shape[{dim}]")
    elif expected.size is not None:
        sizes.check(expected.size, found, where)
    elif expected.constant is not None and not _is_same(expected.constant, found):
        raise RuntimeError(f"Expected input at {where} to be equal to {expected.constant}, but got {found}")


def _is_same(constant: Any, found: Any) -> bool:
    both_nan = isinstance(constant, float) and isinstance(found, float) and math.isnan(constant) and math.isnan(found)
    return type(constant) is type(found) and (constant == found or both_nan)


class _Sizes:
    """The values that symbols have taken so far in one call."""

    def __init__(self, ranges: Mapping[Any, Any]) -> None:
        self._ranges = ranges
        self._values: dict[Any, int] = {}

    def check(self, expected: Size, found: Any, where: str) -> None:
        """Compare one size, solving for its symbol where that has no value yet."""
        if isinstance(found, torch.SymInt):  # traced again: the tracer keeps its own constraints
            return
        if isinstance(expected, int):
            self._equal(expected, found, where)
        elif len(expected.free_symbols) == 1:  # torch defers an expression over several to the graph
            (symbol,) = expected.free_symbols
            if symbol in self._values:
                self._equal(expected.subs(self._values), found, where)
            else:
                self._values[symbol] = found if expected == symbol else _solved(expected, symbol, found, where)
            self._in_range(expected, found, where)

    def _equal(self, expected: object, found: object, where: str) -> None:
        if found != expected:
            raise RuntimeError(f"Expected input at {where} to be equal to {expected}, but got {found}")

    def _in_range(self, expected: Size, found: int, where: str) -> None:
        allowed = self._ranges.get(expected)
        if allowed is None:
            return
        if allowed.lower > 2 and found < allowed.lower:  # sizes 0 and 1 are allowed although export assumes 2
            raise RuntimeError(f"Expected input at {where} to be >= {allowed.lower}, but got {found}")
        if found > allowed.upper:
            raise RuntimeError(f"Expected input at {where} to be <= {allowed.upper}, but got {found}")


def _solved(expression: Size, symbol: Any, found: int, where: str) -> int:
    import sympy  # type: ignore[import-untyped]  # it ships no types
    from torch.utils._sympy.solve import try_solve

    solution = try_solve(sympy.Eq(expression, found), symbol)
    if solution is None:
        raise RuntimeError(
            f"Expected input {where} = {found} to be of the form {expression}, where {symbol} is an integer"
        )
    return int(solution[1])
