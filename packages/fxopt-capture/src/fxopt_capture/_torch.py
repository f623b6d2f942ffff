"""The seam to torch: the one file of fxopt-capture that names private parts of torch.export and of graphs.

When torch moves these, this file changes. It reports missing parts at import, so that no model is blamed for them.
"""

from __future__ import annotations

import importlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch._functorch import predispatch
from torch._guards import Source
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node
from torch.fx.experimental import _config as symbolic_shapes_config, symbolic_shapes
from torch.fx.graph import CodeGen
from torch.fx.node import has_side_effect
from torch.nn.modules import batchnorm
from torch.utils import _mode_utils, _python_dispatch, _pytree as pytree
from torch.utils._sympy import functions as sympy_functions
from torch.utils._sympy.numbers import int_oo

from fxopt_core import (
    PyTreeCodeGen,
    PyTreeInfo,
    require_torch,
    type_text,
)

_RECURRENT: list[Any] = [
    *(torch.ops.aten.lstm.input, torch.ops.aten.gru.input),
    *(torch.ops.aten.rnn_tanh.input, torch.ops.aten.rnn_relu.input),
]
#: The keys under which torch takes a recurrent layer apart, into a loop over its steps.
_DECOMPOSED = (torch._C.DispatchKey.CompositeImplicitAutograd, torch._C.DispatchKey.Autograd)
simplification: Any = importlib.import_module("sympy.simplify.simplify")
# Attributes of the class, not of an instance, since making one loads NumPy.
_OF_ENVIRONMENTS = (
    *("_suppress_guards_tls", "create_unbacked_symint", "create_symbol", "create_symintnode"),
    *("constrain_symbol_range", "_maybe_evaluate_static"),
)
require_torch(
    "fxopt-capture",
    [
        (predispatch, ("_vmap_increment_nesting", "_vmap_decrement_nesting", "lazy_load_decompositions")),
        (symbolic_shapes, ("TLS", "DimDynamic")),
        (symbolic_shapes_config, ("backed_size_oblivious", "patch")),
        (symbolic_shapes.ShapeEnv, _OF_ENVIRONMENTS),
        (Graph(), ("_codegen",)),
        (Node, ("_rename",)),
        (batchnorm, ("_BatchNorm",)),
        (_mode_utils, ("no_dispatch",)),
        (_python_dispatch, ("_disable_current_modes",)),
        (_RECURRENT[0], ("py_kernels", "_dispatch_cache")),
        (simplification, ("simplify",)),
        (sympy_functions, ("FloorDiv", "Mod")),
    ],
)

BatchNorm = batchnorm._BatchNorm
no_dispatch: Callable[[], Any] = _mode_utils.no_dispatch
without_modes: Callable[[], Any] = _python_dispatch._disable_current_modes

# Nothing reads the results of these calls, but they are not dead code: without them, ``torch.vmap`` in a graph crashes.
for _step in (predispatch._vmap_increment_nesting, predispatch._vmap_decrement_nesting):
    has_side_effect(_step)
has_side_effect(predispatch.lazy_load_decompositions)


def assumptions(program: ExportedProgram) -> list[str]:
    """Return the guards of a program as Python code; changes to the list change the program.

    torch checks them in a function that cannot be pickled.
    """
    guards: list[str] = program._guards_code
    return guards


def graph_module_of(program: ExportedProgram) -> GraphModule:
    """Return a program as a graph module that has its tensors as attributes and checks no inputs."""
    module = program.module(check_guards=False)
    if not isinstance(module, GraphModule):
        raise TypeError(f"torch.export made {type_text(module)} of the program, not a GraphModule")
    return module


@contextmanager
def guarding(*, small_sizes: bool) -> Iterator[None]:
    """Let torch record guards on sizes, even in a thread where they are suppressed.

    They are suppressed inside ``ShapeEnv.suppress_guards()``, and remain so if its end was interrupted. Without guards,
    a graph would accept sizes for which the model takes another branch. With `small_sizes`, dynamic sizes may be 0 or
    1.
    """
    former = symbolic_shapes.ShapeEnv._suppress_guards_tls()
    symbolic_shapes.TLS.suppress_guards = False
    try:
        with symbolic_shapes_config.patch(backed_size_oblivious=small_sizes):  # type: ignore[attr-defined]  # installed at import
            yield
    finally:
        symbolic_shapes.TLS.suppress_guards = former


@contextmanager
def counting(counted: Callable[[Callable[..., Any]], Callable[..., Any]]) -> Iterator[None]:
    """Wrap all work on expressions of sizes with ``counted``, in any thread.

    This work is what torch asks its shape environment, and what sympy simplifies, part by part: with nested quotients
    and remainders, it may never end.
    """
    names = [(symbolic_shapes.ShapeEnv, "_maybe_evaluate_static"), (simplification, "simplify")]
    names += [(kind, "eval") for kind in (sympy_functions.FloorDiv, sympy_functions.Mod)]
    originals = [(owner, name, vars(owner)[name]) for owner, name in names]
    for owner, name, original in originals:
        # `eval` is a classmethod: the function in it is wrapped, and made a classmethod again.
        function = getattr(original, "__func__", original)
        replaced = counted(function)
        setattr(owner, name, replaced if function is original else classmethod(replaced))  # as long as this is open
    try:
        yield
    finally:
        for owner, name, original in originals:
            setattr(owner, name, original)


@contextmanager
def any_number_of_steps() -> Iterator[None]:
    """Let recurrent layers compute only the shapes of their results while they are traced in this thread.

    torch would run the steps of the example one by one to find the shapes, and so fix the number of steps, though the
    call in the graph takes any number.
    """
    thread = threading.get_ident()

    def by_shapes(original: Any) -> Any:
        def results(input: torch.Tensor, hx: Any, params: Any, *flags: Any) -> Any:
            if threading.get_ident() != thread or not isinstance(input, FakeTensor):
                return original(input, hx, params, *flags)
            # States are (layers * directions, batch, features); an LSTM has two of them, the other layers have one.
            states = [hx] if isinstance(hx, torch.Tensor) else hx
            # The flags are has_biases, num_layers, dropout, train, bidirectional and batch_first.
            _, _, _, _, bidirectional, batch_first = flags
            batch, steps = input.shape[:2] if batch_first else (input.shape[1], input.shape[0])
            output = input.new_empty((steps, batch, states[0].shape[-1] * (2 if bidirectional else 1)))
            return (
                output.transpose(0, 1) if batch_first else output,
                *(state.new_empty(state.shape) for state in states),
            )

        return results

    keys = [(operator, key) for operator in _RECURRENT for key in _DECOMPOSED if key in operator.py_kernels]
    kernels = [(operator, key, operator.py_kernels[key]) for operator, key in keys]
    for operator, key, original in kernels:
        # An operator remembers the kernel that it found for a key, so what it remembers is cleared with each change.
        operator.py_kernels[key] = by_shapes(original)  # as long as this is open
        operator._dispatch_cache.clear()
    try:
        yield
    finally:
        for operator, key, original in kernels:
            operator.py_kernels[key] = original
            operator._dispatch_cache.clear()


def unmark(value: object) -> None:
    """Remove the marks of dynamic sizes that a failed export has left on the tensors in a value.

    They would make sizes dynamic in the next export, which is to fix them.
    """
    for tensor in pytree.tree_leaves(value):
        if isinstance(tensor, torch.Tensor):
            for name in [name for name in vars(tensor) if name.startswith(("_dynamo_", "_has_dynamo_"))]:
                delattr(tensor, name)


def release_real_tensors(graph: Graph) -> None:
    """Drop the weak references from ``meta["val"]`` of nodes to the tensors that the fake values were made from.

    ``torch.utils.swap_tensors`` refuses a parameter with weak references to it.
    """
    values = (node.meta.get("val") for node in graph.nodes)
    for mode in {value.fake_mode for value in values if isinstance(value, FakeTensor)}:
        mode.fake_tensor_converter.meta_converter.describer.lookup_tensor.clear()


def is_hook_of_export(hook: object) -> bool:
    """Return whether torch.export has put a hook on the graph module that it makes of a program."""
    return getattr(hook, "__module__", None) == "torch.export._unlift"


def size_range(env: symbolic_shapes.ShapeEnv, symbol: Any) -> list[int | None]:
    """Return the size of a symbol in the example, and its least and largest size; None for each that is unknown."""
    bounds: Any = env.var_to_range.get(symbol)
    found: list[Any] = [
        env.backed_var_to_val.get(symbol),
        getattr(bounds, "lower", None),
        getattr(bounds, "upper", None),
    ]
    return [int(each) if getattr(each, "is_Integer", isinstance(each, int)) else None for each in found]


class _Unnamed(Source):
    """The source of a size that no call has given."""

    name = "size"


class FreeSizes:
    """Makes symbolic sizes."""

    def __init__(self) -> None:
        self.env = symbolic_shapes.ShapeEnv()

    def new(self, hint: int | None, least: int | None, largest: int | None) -> int | torch.SymInt:
        """Return a new size, with the hint and the bounds that `size_range` returns."""
        size: int | torch.SymInt
        if hint is None:
            size = self.env.create_unbacked_symint()
            symbol: Any = size.node.expr
        else:
            source = _Unnamed()
            # Otherwise a hint of 0 or 1 would become a constant.
            symbol = self.env.create_symbol(
                hint, source, symbolic_shapes.DimDynamic.DYNAMIC, None, do_not_specialize_zero_one=True
            )
            size = self.env.create_symintnode(symbol, hint=hint, source=source)
        self.env.constrain_symbol_range(symbol, 0 if least is None else least, int_oo if largest is None else largest)
        return size


def set_name(node: Node, name: str) -> None:
    """Rename a node; torch makes the name unique."""
    node._rename(name)


def pytree_info(graph: Graph) -> PyTreeInfo | None:
    """Return how a graph flattens its inputs and builds its output; None if it takes and returns plain values."""
    codegen = graph._codegen
    return codegen.pytree_info if isinstance(codegen, PyTreeCodeGen) else None


def set_pytree_info(
    graph: Graph, names: Sequence[str], inputs: pytree.TreeSpec, outputs: pytree.TreeSpec | None
) -> None:
    """Let a graph take arguments of these names, nested as in ``inputs``, and nest its outputs as in ``outputs``."""
    graph.set_codegen(PyTreeCodeGen(PyTreeInfo(list(names), inputs, outputs)))


def drop_pytree_info(graph: Graph) -> None:
    """Let a graph take and return flat values, as its placeholders and its output have them."""
    graph.set_codegen(CodeGen())
