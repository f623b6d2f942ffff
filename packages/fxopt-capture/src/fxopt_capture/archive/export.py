"""`export`: a graph module as a program of ``torch.export``, which needs only torch to run."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.utils import _pytree as pytree

from fxopt_capture._torch import assumptions, pytree_info
from fxopt_capture.call.arguments import CallForm, InputBinding, Parameter, bind_call
from fxopt_capture.call.guards import GUARDS, GuardedCall, InputGuards
from fxopt_capture.captured import CapturedModule
from fxopt_capture.exporting.conditions import read_guards, relations, size_expression
from fxopt_capture.exporting.dynamic import automatic_shapes, batch_dimension, requested_shapes
from fxopt_capture.exporting.failure import first_line, source_of
from fxopt_capture.exporting.program import ready_to_export
from fxopt_capture.exporting.small_sizes import open_questions
from fxopt_capture.one_at_a_time import one_at_a_time
from fxopt_core import (
    check_graph_module,
    iter_nodes,
    type_text,
)
from fxopt_core.errors import CaptureError

_GIVE = "give example inputs: export(graph_module, args, kwargs)"
_TRIED = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)
_PREFIX = "L__self__"


@one_at_a_time()
def export(
    graph_module: GraphModule,
    args: Sequence[object] | torch.Tensor | None = None,
    kwargs: Mapping[str, object] | None = None,
    *,
    dynamic_shapes: Any = None,
    source_lines: bool = False,
) -> ExportedProgram:
    """Export a graph module as a program that needs only torch: for ``torch.export.save``, AOTInductor or ONNX.

    The program has the graph module's ``state_dict`` keys, dynamic sizes and guards, and no history. It takes arguments
    without default by position and the others by name, unless `args` and `kwargs` say otherwise.

    Args:
        graph_module: the graph module, captured, loaded or traced.
        args: positional example inputs. Needed, like `kwargs`, if the graph does not know the shapes of its inputs.
        kwargs: example inputs by name.
        dynamic_shapes: which sizes vary, as in ``torch.export.export``, by name of the input. None: those that vary in
            the graph module; for one that was traced without shapes, the first dimension of each tensor.
        source_lines: whether nodes keep the lines of the model's code, with the paths of its files.

    Raises:
        CaptureError: ``torch.export`` refuses the graph or the inputs, or the program would accept fewer sizes.

    >>> from fxopt_capture import capture
    >>> program = export(capture(nn.Linear(4, 3), torch.zeros(2, 4)))
    >>> program.module()(torch.zeros(5, 4)).shape
    torch.Size([5, 3])
    """
    check_graph_module(graph_module, "export")
    call, _ = call_of(graph_module, _positional(args), _by_name(kwargs), dynamic_shapes)
    guards = _guards_to_state(graph_module, call) if dynamic_shapes is None else InputGuards([], [])
    program = _exported(graph_module, call, guards)
    if not source_lines:  # which torch would write into each file of it
        for module in program.graph_module.modules():
            for node in iter_nodes(module.graph) if isinstance(module, GraphModule) else ():
                node.meta.pop("stack_trace", None)
    return program


def _positional(args: object) -> tuple[object, ...] | None:
    if isinstance(args, torch.Tensor) or args is None:
        return None if args is None else (args,)
    if isinstance(args, Mapping | str) or not isinstance(args, Sequence):
        raise CaptureError(f"args is {type_text(args)}; give a tensor, or a tuple of the positional inputs")
    return tuple(args)


def _by_name(kwargs: object) -> Mapping[str, object] | None:
    if kwargs is None or isinstance(kwargs, Mapping):
        return kwargs
    raise CaptureError(f"kwargs is {type_text(kwargs)}; give a dictionary from names of inputs to their values")


# -- the call that a graph module is exported with


@dataclass(frozen=True)
class ExampleCall:
    """How a program is called.

    Attributes:
        inputs: an example of each input by name, in the graph's order.
        positional: how many of them, from the first, are given by position.
        shapes: per name, what ``torch.export`` takes as dynamic shapes; or a ``ShapesCollection``.
        dynamic: for each tensor among the leaves of `inputs`, the dimensions that have to stay dynamic.
    """

    inputs: Mapping[str, object]
    positional: int
    shapes: Any
    dynamic: Sequence[Sequence[int]] = ()


def call_of(
    graph_module: GraphModule, args: tuple[object, ...] | None, kwargs: Mapping[str, object] | None, dynamic_shapes: Any
) -> tuple[ExampleCall, CallForm]:
    """Return the example call that a graph module is exported with, and its form."""
    binding = binding_in(graph_module)
    if args is not None or kwargs is not None:
        form, inputs, positional = _given(graph_module, binding, args or (), dict(kwargs or {}))
    else:
        form, inputs, positional = _derived(graph_module, binding)
    shapes, dynamic = _shapes(graph_module, form, inputs, dynamic_shapes)
    return ExampleCall(inputs, positional, shapes, dynamic), form


def binding_in(graph_module: GraphModule) -> InputBinding | None:
    """Return the input binding of a captured module, or None."""
    return graph_module._input_binding if isinstance(graph_module, CapturedModule) else None


def guards_in(graph_module: GraphModule) -> InputGuards | None:
    """Return the guards of a captured module, or None."""
    guards = graph_module._modules.get(GUARDS)
    return guards if isinstance(guards, InputGuards) else None


def _guards_to_state(graph_module: GraphModule, call: ExampleCall) -> InputGuards:
    """Return the conditions of a graph module on its inputs that an export of its graph would not find."""
    guards, ranges = guards_in(graph_module), getattr(graph_module, "range_constraints", {})
    if guards is not None:
        return guards
    values = [node.meta.get("val") for node in iter_nodes(graph_module.graph) if node.op == "placeholder"]
    paths = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(dict(call.inputs))]
    return InputGuards([], list(relations(ranges, paths, values)) if len(values) == len(paths) else [])


Given = tuple[CallForm, dict[str, object], int]


def _given(
    graph_module: GraphModule, binding: InputBinding | None, args: tuple[object, ...], kwargs: dict[str, Any]
) -> Given:
    if binding is not None:
        inputs = binding.bound(args, kwargs)
        names = [parameter.name for parameter in binding.form.parameters if parameter.positional][: len(args)]
        return binding.form, inputs, _prefix(inputs, lambda name: name in names)
    form, tensors = bind_call(graph_module, args, kwargs)
    values = {**tensors, **form.fixed}
    inputs = {parameter.name: values[parameter.name] for parameter in form.parameters if parameter.name in values}
    return form, inputs, min(len(args), len(inputs))


def _prefix(names: Any, is_positional: Callable[[str], bool]) -> int:
    """Return how many of the names, from the first, are given by position."""
    return len(list(takewhile(is_positional, names)))


def _derived(graph_module: GraphModule, binding: InputBinding | None) -> Given:
    placeholders = [node for node in iter_nodes(graph_module.graph) if node.op == "placeholder"]
    leaves = _leaves(graph_module, placeholders)
    info = pytree_info(graph_module.graph)
    if info is not None:
        args, kwargs = pytree.tree_unflatten(leaves, info.in_spec)
        inputs = {**dict(zip(info.orig_args, args, strict=False)), **kwargs}
    else:
        args, inputs = (), {str(node.target): leaf for node, leaf in zip(placeholders, leaves, strict=True)}
    if binding is not None:
        return binding.form, inputs, _prefix(inputs, _needed_first(binding.form))
    if info is not None:
        parameters = [Parameter(name, index < len(args), True, True) for index, name in enumerate(inputs)]
        return CallForm(tuple(parameters), tuple(inputs)), inputs, len(args)
    parameters = [Parameter(str(n.target), True, True, not n.args, *n.args[:1]) for n in placeholders]
    form = CallForm(tuple(parameters), tuple(inputs))
    return form, inputs, _prefix(inputs, _needed_first(form))


def _needed_first(form: CallForm) -> Callable[[str], bool]:
    """Return a function that tells whether an argument is given by position: it has no default or no keyword."""
    known = {one.name: one.positional and (one.required or not one.keyword) for one in form.parameters}
    return lambda name: known.get(name, False)


def _leaves(graph_module: GraphModule, placeholders: Sequence[Node]) -> list[object]:
    """Return an example of each input, flat."""
    values = [node.meta.get("val") for node in placeholders]
    guards = guards_in(graph_module)
    if all(_is_example(value) for value in values):
        leaves = [_example(value) for value in values]
        if guards is None or len(guards.specs) != len(leaves) or guards.accepts(leaves):
            return leaves
    binding = binding_in(graph_module)
    if guards is not None and len(guards.specs) == len(placeholders) and binding is not None:
        return _accepted(graph_module, guards)
    missing = next((node.name for node, value in zip(placeholders, values, strict=True) if not _is_example(value)), "")
    raise CaptureError(f"nothing is known of the shape of input `{missing}` of this graph module; {_GIVE}")


def _is_example(value: object) -> bool:
    return isinstance(value, torch.Tensor | bool | int | float | str)


def _example(value: object) -> object:
    """Return zeros of the shape of a value, with the sizes of the capture for dynamic ones."""
    if not isinstance(value, torch.Tensor):
        return value
    sizes = [_hint(size) for size in value.shape]
    return torch.zeros(sizes, dtype=value.dtype, device=value.device)


def _hint(size: int | torch.SymInt) -> int:
    if isinstance(size, int):
        return size
    hint = size.node.hint
    return max(2, int(hint)) if hint is not None else 2


def _accepted(graph_module: GraphModule, guards: InputGuards) -> list[object]:
    """Return inputs that a captured module accepts, in shapes derived from its guards."""
    parameter = next((one for one in graph_module.parameters() if one.is_floating_point()), torch.zeros(()))
    dtypes = {"bool": torch.bool, "integer": torch.int64, "floating": parameter.dtype, "complex": torch.complex64}
    for size in _TRIED:
        leaves: list[object] = []
        for spec in guards.specs:
            if spec.kind is None:
                leaves.append(spec.value)
                continue
            sizes = [size if fixed is None else fixed for fixed in spec.sizes]
            dtype, fill = spec.dtype or dtypes[spec.kind], int(spec.ones is True)
            leaves.append(torch.full(sizes, fill, dtype=dtype, device=parameter.device))
        if guards.accepts(leaves):
            return leaves
    raise CaptureError(f"no sizes were found that the captured module accepts ({guards.extra_repr()}); {_GIVE}")


def _shapes(
    graph_module: GraphModule, form: CallForm, inputs: dict[str, object], dynamic_shapes: Any
) -> tuple[Any, list[Sequence[int]]]:
    """Return the dynamic shapes of an export, and the dimensions of each leaf that have to stay dynamic."""
    if dynamic_shapes is not None:
        named = requested_shapes(form, dynamic_shapes, inputs)
        return (named if isinstance(named, ShapesCollection) else {name: named.get(name) for name in inputs}), []
    dynamic = _dynamic_dimensions(graph_module)
    leaves = pytree.tree_leaves(list(inputs.values()))
    if dynamic is None or len(dynamic) != len(leaves):
        return automatic_shapes(inputs, batch_dimension), []
    shapes = ShapesCollection()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for leaf, dimensions in zip(leaves, dynamic, strict=True):
        if isinstance(leaf, torch.Tensor) and dimensions:
            small = [dimension for dimension in dimensions if leaf.size(dimension) < 2]
            if small:
                raise CaptureError(
                    f"an input of shape {tuple(leaf.shape)} is given to export the graph module with, and its "
                    f"dimension {small[0]} is dynamic: give a size of 2 or more there, as torch.export takes 0 and 1 "
                    f"for fixed"
                )
            shapes[leaf] = dict.fromkeys(dimensions, Dim.AUTO)
    return shapes, dynamic


def _dynamic_dimensions(graph_module: GraphModule) -> list[Sequence[int]] | None:
    """Return the dynamic dimensions of each input, by the guards or else by ``meta["val"]``; None if unknown."""
    guards = guards_in(graph_module)
    if guards is not None:
        return [[dim for dim, size in enumerate(spec.sizes) if size is None] for spec in guards.specs]
    if pytree_info(graph_module.graph) is None:
        return None
    values = [node.meta.get("val") for node in iter_nodes(graph_module.graph) if node.op == "placeholder"]
    shapes = [tuple(value.shape) if isinstance(value, torch.Tensor) else () for value in values]
    return [[dim for dim, size in enumerate(shape) if type(size) is not int] for shape in shapes]


# -- the program


def _exported(graph_module: GraphModule, call: ExampleCall, guards: InputGuards) -> ExportedProgram:
    """Export a graph module to a program with the given guards.

    Names of parameters and buffers are those of the graph module, and each operator has the module stack of the node
    that it comes from. The graph module is left as it was.

    A captured graph has all guards that it needs, but an export may find others, which refuse sizes for which the graph
    is right. Of the export that allows sizes of 0 and 1 and the usual one, the one that refuses fewer of these sizes is
    taken, and in a tie the one with fewer additional guards.
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


def _export(graph_module: GraphModule, call: ExampleCall, *, small_sizes: bool) -> ExportedProgram:
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
    return program


def _failure(error: Exception) -> CaptureError:
    place = source_of(error)
    return CaptureError(
        f"torch.export refuses the graph: {type(error).__name__}: "
        f"{first_line(error)}{f' at {place}' if place else ''}. Check that the graph module runs on the inputs (give "
        f"them as args and kwargs)"
    )


class _Host(nn.Module):
    """Holds the tensors and modules of a graph module, and runs its graph node by node.

    The traced operators keep the stack trace and the module stack of the node that they come from. Hooks of the graph
    module, which bind and check arguments, are not run.
    """

    def __init__(self, graph_module: GraphModule, call: ExampleCall) -> None:
        super().__init__()
        for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set"):
            vars(self)[name] = vars(graph_module)[name]
        self.training = graph_module.training
        vars(self)["forward"] = _forward(self, graph_module, list(call.inputs))


def _forward(host: nn.Module, graph_module: GraphModule, names: Sequence[str]) -> Callable[..., object]:
    """Return a function that takes the inputs by name, as ``torch.export`` reads them from its signature."""
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
    """Runs a graph, and puts each called module on the module stack of what it computes."""

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
        """Return the module stack of a node, without the prefix that each export adds."""
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
    """Return ``meta["val"]`` of the placeholders of a program's user inputs, in order."""
    given = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"}
    nodes = [node for node in iter_nodes(program.graph) if node.op == "placeholder" and node.name in given]
    return [node.meta.get("val") for node in nodes]


def _demand_dynamic(program: ExportedProgram, call: ExampleCall) -> None:
    """Refuse a program that fixes sizes which are dynamic in the graph module."""
    paths = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(dict(call.inputs))]
    for path, value, dimensions in zip(paths, user_values(program), call.dynamic, strict=False):
        for dimension in dimensions:
            size = value.shape[dimension] if isinstance(value, torch.Tensor) else None
            if size is not None and size_expression(size) is None:
                raise CaptureError(
                    f"dimension {dimension} of input {path} is dynamic in this graph module, and the program "
                    f"would hold for size {int(size)} alone, because something in the graph fixes it: a pass or "
                    f"a node that was added. Give `dynamic_shapes` that make it static"
                )


def _state(program: ExportedProgram, call: ExampleCall, guards: InputGuards) -> int:
    """Add `guards` to those of a program; return how many others it has, which stay."""
    paths = [path for path, _ in pytree.tree_leaves_with_path(dict(call.inputs))]
    stated = [_in_terms_of(condition.code, paths) for condition in guards.conditions]
    known = set(map(_normal_form, stated))
    own = [code for code in assumptions(program) if _normal_form(code) not in known]
    assumptions(program)[:] = [*stated, *own]
    return len(own)


def _refused_sizes(program: ExportedProgram, call: ExampleCall, guards: InputGuards) -> int:
    """Return how many small sizes a program refuses that `guards` accept."""
    values = user_values(program)
    strict = read_guards(program, call.inputs, values, None)
    return len(open_questions(values, guards, strict, pytree.tree_leaves(dict(call.inputs))))


def _in_terms_of(code: str, paths: Sequence[pytree.KeyPath]) -> str:
    """Write a condition on ``i[0]`` as torch writes it: on ``L['input_ids']``."""
    for index, path in reversed(list(enumerate(paths))):
        code = code.replace(f"i[{index}]", f"L{pytree.keystr(path)}")
    return code


def _normal_form(code: str) -> object:
    """Return a key that ignores the spelling of a condition: spaces, parentheses, sides of an equation."""
    tree = ast.parse(code, mode="eval").body
    if isinstance(tree, ast.Compare) and len(tree.ops) == 1 and isinstance(tree.ops[0], ast.Eq):
        return frozenset(map(ast.unparse, (tree.left, tree.comparators[0])))
    return ast.unparse(tree)
