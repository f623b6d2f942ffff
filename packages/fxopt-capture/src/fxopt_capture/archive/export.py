"""Export a graph module for an archive: the call that it is exported with, and the program."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from fxopt_capture._torch import assumptions
from fxopt_capture.archive.expressions import normal_form
from fxopt_capture.call.guards import GuardedCall, InputGuards
from fxopt_capture.export.conditions import read_guards, size_expression
from fxopt_capture.export.failure import first_line, source_of
from fxopt_capture.export.program import ready_to_export
from fxopt_capture.export.small_sizes import open_questions
from fxopt_core._torch import pytree_info
from fxopt_core.errors import CaptureError
from fxopt_core.graph import iter_nodes

_PREFIX = "L__self__"


@dataclass(frozen=True)
class ArchiveCall:
    """How the program of an archive is called.

    Attributes:
        inputs: an example of each input by name, in the graph's order.
        positional: how many of them, from the first, are given by position.
        shapes: per name, what ``torch.export`` takes as dynamic shapes; or a ``ShapesCollection``.
        dynamic: per tensor among the leaves of `inputs` the dimensions that have to stay dynamic.
    """

    inputs: Mapping[str, object]
    positional: int
    shapes: Any
    dynamic: Sequence[Sequence[int]] = ()


def export_graph(graph_module: GraphModule, call: ArchiveCall, guards: InputGuards) -> ExportedProgram:
    """Export a graph module to a program that demands of its inputs what `guards` do.

    Names of parameters and buffers are the graph module's own, and each operator knows the stack of modules of the node
    that it comes from. The graph module is left as it was.

    A graph that was captured has all guards that it needs, and an export may find others, which refuse sizes that the
    graph is right for: of the export that allows sizes of 0 and 1 and the usual one, the one that refuses fewer of
    these sizes is taken, and of two alike the one that finds fewer guards.
    """
    found: list[tuple[tuple[int, int], ExportedProgram]] = []
    failure: CaptureError | None = None
    for small_sizes in (True, False) if guards.specs else (False,):
        try:
            program = _export(graph_module, call, small_sizes=small_sizes)
        except CaptureError as error:
            failure = error
            continue
        refused = _refused_sizes(program, call, guards) if guards.specs else 0
        own = _state(program, call, guards)
        found.insert(0, ((refused, own), program))
        if not own:
            break
    if not found and failure is not None:
        raise failure
    return min(found, key=lambda one: one[0])[1]


def _export(graph_module: GraphModule, call: ArchiveCall, *, small_sizes: bool) -> ExportedProgram:
    names = list(call.inputs)
    args = tuple(call.inputs[name] for name in names[: call.positional])
    kwargs = {name: call.inputs[name] for name in names[call.positional :]}
    try:
        with ready_to_export(graph_module, small_sizes=small_sizes):
            host = _Host(graph_module, call)
            program = torch.export.export(host, args, kwargs, dynamic_shapes=call.shapes, strict=False)
    except CaptureError as error:  # to which the interpreter has added the node that it was at
        raise CaptureError(str(error).partition("\n\nWhile executing")[0]) from error
    except Exception as error:  # whatever torch or the graph raises while it is traced
        raise _failure(error) from error
    _demand_dynamic(program, call)
    _demand_readable(program)
    return program


def _failure(error: Exception) -> CaptureError:
    place = source_of(error)
    return CaptureError(
        f"the graph module cannot be saved, as torch.export refuses its graph: {type(error).__name__}: "
        f"{first_line(error)}{f' at {place}' if place else ''}. Check that the graph module runs on the inputs (give "
        f"them as args and kwargs)"
    )


class _Host(nn.Module):
    """Holds what a graph module does, and runs its graph node by node.

    What is traced then keeps the stack trace and the stack of modules of the node that it comes from. Hooks of the
    graph module are not run: they sort arguments and check them.
    """

    def __init__(self, graph_module: GraphModule, call: ArchiveCall) -> None:
        super().__init__()
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[name] = vars(graph_module)[name]
        self.training = graph_module.training
        vars(self)["forward"] = _forward(self, graph_module, list(call.inputs))


def _forward(host: nn.Module, graph_module: GraphModule, names: Sequence[str]) -> Callable[..., object]:
    """Return a function that takes the inputs by name, as ``torch.export`` reads them off its signature."""
    graph = graph_module.graph
    checks = [hook for hook in graph_module._forward_pre_hooks.values() if isinstance(hook, GuardedCall)]

    def forward(*args: object, **kwargs: object) -> object:
        inputs = dict(zip(names, args, strict=False)) | kwargs
        for check in checks:
            check.guards(*pytree.tree_leaves(inputs))
        with fx_traceback.preserve_node_meta():
            result = _Named(host, graph=graph).run(*_flat(graph, inputs), enable_io_processing=False)
        return graph.process_outputs(result)

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    forward.__signature__ = signature  # type: ignore[attr-defined]  # read by inspect.signature
    return forward


class _Named(Interpreter):
    """Runs a graph; what a module computes is known to come from the module of that name."""

    def run_node(self, n: Node) -> Any:
        before = n.meta.get("nn_module_stack")
        stack = self._stack(n, before or {})
        if stack == before:
            return super().run_node(n)
        n.meta["nn_module_stack"] = stack
        try:
            return super().run_node(n)
        finally:
            if before is None:
                del n.meta["nn_module_stack"]
            else:
                n.meta["nn_module_stack"] = before

    def _stack(self, n: Node, before: Mapping[str, Any]) -> dict[str, Any]:
        """Return the stack of modules that a node runs in, without the prefix that each export adds."""
        stack = {key.removeprefix(_PREFIX): entry for key, entry in before.items()}
        module = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
        innermost = str(list(stack.values())[-1][0]).split("@")[0] if stack else None
        if isinstance(module, nn.Module) and innermost != n.target:
            stack[str(n.target)] = (str(n.target), f"{type(module).__module__}.{type(module).__qualname__}")
        return stack


def _flat(graph: Graph, inputs: Mapping[str, object]) -> list[object]:
    if pytree_info(graph) is not None:
        return pytree.tree_leaves(list(inputs.values()))
    values = []
    for node in iter_nodes(graph):
        if node.op == "placeholder":
            values.append(inputs[str(node.target)] if str(node.target) in inputs else next(iter(node.args), None))
    return values


def user_values(program: ExportedProgram) -> list[object]:
    """Return what the placeholders of a program's own inputs hold in ``meta["val"]``, in order."""
    given = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"}
    nodes = [node for node in iter_nodes(program.graph) if node.op == "placeholder" and node.name in given]
    return [node.meta.get("val") for node in nodes]


def _demand_dynamic(program: ExportedProgram, call: ArchiveCall) -> None:
    """Refuse a program that is narrower than the graph module."""
    paths = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(dict(call.inputs))]
    for path, value, dimensions in zip(paths, user_values(program), call.dynamic, strict=False):
        for dimension in dimensions:
            size = value.shape[dimension] if isinstance(value, torch.Tensor) else None
            if size is not None and size_expression(size) is None:
                raise CaptureError(
                    f"dimension {dimension} of input {path} is dynamic in this graph module, and the program to be "
                    f"saved would hold for size {int(size)} alone, because something in the graph fixes it: a pass or "
                    f"a node that was added. Give `dynamic_shapes` that make it static to save it so"
                )


def _demand_readable(program: ExportedProgram) -> None:
    """Refuse a program that torch writes and cannot read again."""
    for spec in program.graph_signature.output_specs:
        value = getattr(spec.arg, "value", None)
        if isinstance(value, str):
            raise CaptureError(
                f"the graph module returns the text {value!r}, and torch.export cannot read archives of such programs; "
                f"let the model return tensors, numbers and None only, and capture it again"
            )


def _state(program: ExportedProgram, call: ArchiveCall, guards: InputGuards) -> int:
    """Let a program demand of its inputs all that `guards` do; return how much more it demands itself, which stays."""
    paths = [path for path, _ in pytree.tree_leaves_with_path(dict(call.inputs))]
    stated = [_in_terms_of(condition.code, paths) for condition in guards.conditions]
    known = set(map(normal_form, stated))
    own = [code for code in assumptions(program) if normal_form(code) not in known]
    assumptions(program)[:] = [*stated, *own]
    return len(own)


def _refused_sizes(program: ExportedProgram, call: ArchiveCall, guards: InputGuards) -> int:
    """Return how many of the small sizes that `guards` let pass a program refuses."""
    values = user_values(program)
    strict = read_guards(program, call.inputs, values, None)
    return len(open_questions(values, guards, strict, pytree.tree_leaves(dict(call.inputs))))


def _in_terms_of(code: str, paths: Sequence[pytree.KeyPath]) -> str:
    """Write a condition on ``i[0]`` as torch writes it: on ``L['input_ids']``."""
    for index, path in reversed(list(enumerate(paths))):
        code = code.replace(f"i[{index}]", f"L{pytree.keystr(path)}")
    return code
