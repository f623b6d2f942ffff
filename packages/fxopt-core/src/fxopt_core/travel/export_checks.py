"""What ``torch.export(...).module()`` hangs on a graph module besides its graph, and what of it pickles.

Guards are compiled and their source is gone, so they are refused. Without guards torch checks sizes against the `val`
of the placeholders, which no pickle holds; the pickle has `InputChecks` instead.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import MethodType
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.fx import Graph, Node

from fxopt_core.errors import FxoptError


@dataclass(frozen=True)
class InputChecks:
    """A forward pre-hook that refuses the inputs that torch's own hook refuses.

    For each flat input it has the sizes of its tensor, integers or sympy expressions over the symbols of the module's
    range constraints, or its constant, or None for one that may be anything.
    """

    inputs: tuple[Any, ...]

    def __call__(self, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Raise a `ValueError` for inputs of another structure, a `RuntimeError` for other sizes and constants."""
        from torch.export._unlift import _check_inputs_match  # a second of imports, which only this needs

        if module.validate_inputs:
            found = _check_inputs_match(args, kwargs, module._in_spec)
            if not torch.compiler.is_dynamo_compiling():
                self._check(found, module.range_constraints)

    def _check(self, found: list[tuple[Any, Any]], ranges: Any) -> None:
        from torch._export.utils import _check_symint, get_keystr

        symbols: dict[Any, int] = {}
        for (path, value), expected in zip(found, self.inputs, strict=True):
            where = get_keystr(path)
            if isinstance(expected, tuple):
                if not isinstance(value, Tensor):
                    raise RuntimeError(f"Expected input at {where} to be a tensor, but got {type(value)}")
                if len(expected) != value.dim():
                    raise RuntimeError(
                        f"Unexpected number of dimensions in input at {where}.shape "
                        f"(expected {list(expected)}, got {list(value.shape)})"
                    )
                for dim, size in enumerate(expected):
                    _check_symint(_symint(size), value.shape[dim], ranges, symbols, path, dim)
            elif isinstance(expected, (int, float, str)):
                if type(value) is not type(expected) or not (
                    value == expected or value != value != expected != expected
                ):
                    raise RuntimeError(f"Expected input at {where} to be equal to {expected}, but got {value}")
            elif expected is not None:
                _check_symint(_symint(expected), value, ranges, symbols, path)


def pickled_hook(hook: Any, graph: Graph) -> Any:
    """Return what a hook of a graph module becomes in a pickle; None for one of torch that does nothing."""
    unlift = _unlift()
    if unlift is None or getattr(hook, "__module__", None) != unlift.__name__:
        return hook
    if hook is unlift._check_input_constraints_pre_hook:
        return InputChecks(tuple(_expected(node) for node in graph.find_nodes(op="placeholder")))
    # The two others let modules of some types be inputs.
    return hook if any(cell.cell_contents for cell in hook.__closure__ or ()) else None


def pickled_method(name: str, method: MethodType) -> Any:
    """Return the function of a bound method; torch's `train` and `eval` of an exported module are local functions."""
    function: Any = method.__func__
    is_of_export = getattr(function, "__module__", None) == "torch.export.exported_program"
    return _REFUSING.get(name, function) if is_of_export else function


def check_no_guards(module: object) -> None:
    """Refuse the guards of an exported program, with an `FxoptError`."""
    unlift = _unlift()
    if unlift is not None and isinstance(module, unlift.GuardsFn):
        raise FxoptError(
            "the guards of `torch.export(...).module()` cannot be pickled: torch compiles them and drops their source; "
            "make the graph module with `fxopt_capture.capture`, whose guards pickle, or with "
            "`exported_program.module(check_guards=False)`, which checks only sizes and constants"
        )


def refuse_train(self: object, mode: bool = True) -> NoReturn:
    """Refuse as `train` of an exported module does, whose graph is fixed to one mode."""
    raise NotImplementedError("Calling train() is not supported yet.")


def refuse_eval(self: object, mode: bool = True) -> NoReturn:
    """Refuse as `eval` of an exported module does."""
    raise NotImplementedError("Calling eval() is not supported yet.")


_REFUSING = {"train": refuse_train, "eval": refuse_eval}


def _unlift() -> Any:
    """Return the module that makes exported graph modules, where it is loaded: without it there are none."""
    return sys.modules.get("torch.export._unlift")


def _expected(placeholder: Node) -> Any:
    value = placeholder.meta.get("val")
    if isinstance(value, Tensor):
        return tuple(map(_size, value.shape))
    return _size(value) if isinstance(value, (int, float, str, torch.SymInt)) else None


def _size(size: Any) -> Any:
    expression = size.node.expr if isinstance(size, torch.SymInt) else size
    return int(expression) if getattr(expression, "is_number", False) else expression


def _symint(size: Any) -> Any:
    """Return a size as `_check_symint` takes it, which reads the expression alone."""
    if isinstance(size, int):
        return size
    from torch.fx.experimental.sym_node import SymNode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    return torch.SymInt(SymNode(size, ShapeEnv(), int, hint=2))  # type: ignore[no-untyped-call]  # torch's constructor
