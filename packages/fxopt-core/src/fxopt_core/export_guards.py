"""Pickling the guards of an exported graph: the source of a compiled function, recovered and proven.

`ExportedProgram.module()` compiles its guards into one function and forgets the source. Each guard's error message,
however, is the guard itself, written in terms of the parameters: `Guard failed: d['k'].size()[0] >= 3`. Replacing each
input by its place among the flat arguments gives the source back, and compiling that has to give the same code again.
"""

from __future__ import annotations

import ast
import dis
import math
from collections.abc import Iterator
from types import CodeType, FunctionType
from typing import Any

import torch
from torch import nn
from torch.fx.graph import _PyTreeCodeGen
from torch.utils import _pytree as pytree

from fxopt_core.errors import FxoptError
from fxopt_core.references import Rebuilt

_PREFIX = "Guard failed: "


def guards_reference(guards: nn.Module, codegen: object) -> Rebuilt | None:
    """Return what stands for a module of guards in a pickle, or None if it needs nothing special.

    Raises:
        FxoptError: the source of its guards cannot be recovered.
    """
    function = _guard_function(getattr(guards, "forward", None))
    if function is None:
        return None
    messages = list(_messages(function.__code__))
    source = _source(messages, _places(codegen))
    if _behaviour(_compiled(source).__code__) != _behaviour(function.__code__):
        raise FxoptError(
            "the guards of this exported graph cannot be written down for pickling: its input structure was changed "
            "after the export; take `exported_program.module(check_guards=False)`, which pickles its checks as data"
        )
    state = {**vars(guards), "forward": None}
    return Rebuilt(load_guards, type(guards), source, state)


def load_guards(cls: type[nn.Module], source: str, state: dict[str, Any]) -> nn.Module:
    """Make a module of guards from its source."""
    module = cls()
    module.__dict__.update(state)
    # Dynamo has to see the guards when it traces the graph again, as torch arranges for its own.
    module.forward = torch._dynamo.dont_skip_tracing(_compiled(source))
    return module


def _guard_function(forward: object) -> FunctionType | None:
    """Find the compiled guards in `forward`, which torch wraps once or twice."""
    if not isinstance(forward, FunctionType):
        return None
    if forward.__code__.co_filename == "<string>" and forward.__name__ == "_":
        return forward
    cells = (cell.cell_contents for cell in forward.__closure__ or ())
    return next((found for found in map(_guard_function, cells) if found is not None), None)


def _messages(code: CodeType) -> Iterator[str]:
    for instruction in dis.get_instructions(code):
        if isinstance(instruction.argval, str) and instruction.argval.startswith(_PREFIX):
            yield instruction.argval


def _places(codegen: object) -> dict[str, int]:
    """Map how each flat input is written in terms of the parameters, as a syntax tree, to its position."""
    if not isinstance(codegen, _PyTreeCodeGen):
        return {}
    info = codegen.pytree_info
    args, kwargs = pytree.tree_unflatten(list(range(info.in_spec.num_leaves)), info.in_spec)
    named = {**dict(zip(info.orig_args, args, strict=False)), **kwargs}
    places = {}
    for path, position in pytree.tree_leaves_with_path(named):
        text = getattr(path[0], "key", "") + pytree.keystr(path[1:])
        places[ast.dump(ast.parse(text, mode="eval").body)] = position
    return places


class _ByPlace(ast.NodeTransformer):
    """Replaces every expression that denotes an input by `args[position]`."""

    def __init__(self, places: dict[str, int]) -> None:
        self._places = places

    def visit(self, node: ast.AST) -> Any:
        position = self._places.get(ast.dump(node))
        return super().visit(node) if position is None else ast.parse(f"args[{position}]", mode="eval").body


def _source(messages: list[str], places: dict[str, int]) -> str:
    lines = ["def _(*args):"]
    for message in messages:
        guard = _ByPlace(places).visit(ast.parse(message.removeprefix(_PREFIX), mode="eval"))
        lines.append(f"  torch._assert({ast.unparse(guard)}, {message!r})")
    return "\n".join([*lines, "  return", ""])


def _compiled(source: str) -> FunctionType:
    from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP  # imports sympy, which few need

    namespace: dict[str, Any] = {**SYMPY_INTERP, "math": math, "inf": math.inf}
    exec(source, namespace)
    function: FunctionType = namespace["_"]
    return function


def _behaviour(code: CodeType) -> tuple[object, ...]:
    return code.co_code, code.co_names, code.co_consts
