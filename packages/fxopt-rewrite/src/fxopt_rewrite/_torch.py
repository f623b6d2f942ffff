"""The seam to torch: the one file of fxopt-rewrite that names its private parts, checked at import."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import _prims_common
from torch.amp import autocast_mode
from torch.autograd import forward_ad
from torch.fx import Graph, Node, _symbolic_trace, graph as fx_graph
from torch.fx.graph import CodeGen, PythonCode
from torch.fx.traceback import NodeSource
from torch.utils import _mode_utils

from fxopt_core import require_torch

_C = torch._C
_OF_C = ("_len_torch_dispatch_stack", "_len_torch_function_stack", "_functorch", "_get_tracing_state")
_OF_DISPATCH = ("_dispatch_has_kernel", "_dispatch_has_kernel_for_dispatch_key", "_is_any_autocast_enabled")
require_torch(
    "fxopt-rewrite",
    [
        (_C, (*_OF_C, *_OF_DISPATCH)),
        (autocast_mode, ("_enter_autocast", "_exit_autocast")),
        (forward_ad, ("_current_level",)),
        (fx_graph, ("_Namespace",)),
        (NodeSource, ("_from_dict",)),
        (Graph(), ("_root", "_codegen")),
        (CodeGen(), ("_body_transformer", "_gen_python_code")),
        (_symbolic_trace, ("_assert_is_none",)),
        (_mode_utils, ("no_dispatch",)),
        (_prims_common, ("suggest_memory_format",)),
        (torch.UntypedStorage, ("_expired",)),
    ],
)

Namespace = fx_graph._Namespace
source_from_dict: Callable[[dict[str, Any]], Any] = NodeSource._from_dict
dispatch_modes, function_modes = _C._len_torch_dispatch_stack, _C._len_torch_function_stack
functorch_level: Callable[[], Any] = _C._functorch.peek_interpreter_stack
tracing_state: Callable[[], Any] = _C._get_tracing_state
is_any_autocast_enabled: Callable[[], bool] = _C._is_any_autocast_enabled
has_kernel: Callable[[str], bool] = _C._dispatch_has_kernel
has_kernel_for: Callable[[str, str], bool] = _C._dispatch_has_kernel_for_dispatch_key
enter_autocast, exit_autocast = autocast_mode._enter_autocast, autocast_mode._exit_autocast
# What `symbolic_trace` inserts for an input that was fixed to None.
assert_is_none: Callable[..., Any] = _symbolic_trace._assert_is_none
no_dispatch: Callable[[], Any] = _mode_utils.no_dispatch
suggest_memory_format: Callable[[Any], torch.memory_format] = _prims_common.suggest_memory_format
is_gone: Callable[..., Any] = torch.UntypedStorage._expired


def forward_level() -> int:
    """Return the level of forward-mode differentiation; -1 outside of it."""
    return forward_ad._current_level


def sentinel(graph: Graph) -> Node:
    """Return the node before the first one, which is also the one after the last."""
    return graph._root


def generator_class(graph: Graph) -> type[CodeGen]:
    """Return the class of a graph's code generator, or the class of torch's that it stands in for.

    A pass may change how a graph runs by a generator with the same inputs and outputs, whose class attribute
    ``stands_for`` names the class of torch's.

    >>> generator_class(torch.fx.symbolic_trace(torch.nn.ReLU()).graph).__name__
    'CodeGen'
    """
    cls = type(graph._codegen)
    stands_for: type[CodeGen] = getattr(cls, "stands_for", cls)
    return stands_for


def python_code(
    codegen: CodeGen, *args: Any, edit: Callable[[list[str]], list[str]] | None = None, **options: Any
) -> PythonCode:
    """Return the code that a generator writes for a graph; the arguments are those that torch gave to its method.

    ``edit`` changes the lines of the function's body; it is set on the generator, so pass a copy.
    """
    if edit is not None:
        earlier = codegen._body_transformer
        codegen._body_transformer = edit if earlier is None else lambda body: edit(earlier(body))
    return codegen._gen_python_code(*args, **options)


def with_class(codegen: CodeGen, cls: type[CodeGen]) -> CodeGen:
    """Return a code generator of another class with the same settings."""
    twin: CodeGen = cls.__new__(cls)
    vars(twin).update(vars(codegen))
    return twin
