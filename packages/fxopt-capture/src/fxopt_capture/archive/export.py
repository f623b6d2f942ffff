"""`export`: a graph module as a program of ``torch.export``, which needs only torch to run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import torch
import torch.fx.traceback as fx_traceback
from torch import nn
from torch.export import Dim, ExportedProgram, ShapesCollection
from torch.fx import Graph, GraphModule, Interpreter
from torch.utils import _pytree as pytree

from fxopt_capture._torch import assumptions, pytree_info
from fxopt_capture.call.arguments import CallForm, bind_call
from fxopt_capture.call.guards import InputGuards, InputSpec, guards_of
from fxopt_capture.call.structures import inputs_by_name
from fxopt_capture.captured import CapturedModule
from fxopt_capture.exporting.conditions import size_expression
from fxopt_capture.exporting.dynamic import automatic_shapes, batch_dimension, requested_shapes
from fxopt_capture.exporting.failure import described
from fxopt_capture.exporting.program import ready_to_export, taking
from fxopt_capture.one_at_a_time import one_at_a_time
from fxopt_core import (
    check_graph_module,
    iter_nodes,
)
from fxopt_core.errors import CaptureError

_GIVE = "give example inputs: export(graph_module, args, kwargs)"


@one_at_a_time()
def export(
    graph_module: GraphModule,
    args: Sequence[object] | torch.Tensor | None = None,
    kwargs: Mapping[str, object] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> ExportedProgram:
    """Export a graph module as a program that needs only torch: for ``torch.export.save``, AOTInductor or ONNX.

    The program has the graph module's ``state_dict`` keys, dynamic sizes and guards, and no history. It takes arguments
    without default by position and the others by name, unless `args` and `kwargs` say otherwise.

    Args:
        graph_module: the graph module, captured, loaded or traced.
        args: positional example inputs. Needed, like `kwargs`, unless the graph module was captured.
        kwargs: example inputs by name.
        dynamic_shapes: which sizes vary, as in ``torch.export.export``, by name of the input. None: those that vary in
            a captured module; in any other, the first dimension of each tensor.

    Raises:
        CaptureError: ``torch.export`` refuses the graph or the inputs, or the program would accept fewer sizes.

    >>> from fxopt_capture import capture
    >>> program = export(capture(nn.Linear(4, 3), torch.zeros(2, 4)))
    >>> program.module()(torch.zeros(5, 4)).shape
    torch.Size([5, 3])
    """
    check_graph_module(graph_module, "export")
    call = example_call(graph_module, (args,) if isinstance(args, torch.Tensor) else args, kwargs)
    if dynamic_shapes is not None:
        shapes = requested_shapes(call.form, dynamic_shapes, call.inputs)
        if not isinstance(shapes, ShapesCollection):
            shapes = {name: shapes.get(name) for name in call.inputs}
        program = _export(graph_module, call, shapes, small_sizes=False)
    elif isinstance(graph_module, CapturedModule):
        program = _export_guarded(graph_module, call, guards_of(graph_module))
    else:
        program = _export(graph_module, call, automatic_shapes(call.inputs, batch_dimension), small_sizes=False)
    for module in program.graph_module.modules():
        for node in iter_nodes(module.graph) if isinstance(module, GraphModule) else ():
            node.meta.pop("stack_trace", None)  # lines of the model's code, which torch would write into each file
    return program


# -- the call that a graph module is exported with


@dataclass(frozen=True)
class ExampleCall:
    """How a program is called.

    Attributes:
        form: the arguments of the graph module.
        inputs: an example of each input by name, in the graph's order.
        positional: how many of them, from the first, are given by position.
    """

    form: CallForm
    inputs: Mapping[str, object]
    positional: int


def example_call(
    graph_module: GraphModule, args: Sequence[object] | None = None, kwargs: Mapping[str, object] | None = None
) -> ExampleCall:
    """Return the call that a graph module is exported with: with the given inputs, or with what its guards accept.

    Raises:
        CaptureError: No inputs are given, and the graph module was not captured, or none were found that it accepts.
    """
    if not isinstance(graph_module, CapturedModule):
        if args is None and kwargs is None:
            raise CaptureError(f"nothing is known of the shapes of the inputs of this graph module; {_GIVE}")
        form, tensors = bind_call(graph_module, args or (), kwargs or {})
        values = {**tensors, **form.fixed}
        inputs = {parameter.name: values[parameter.name] for parameter in form.parameters if parameter.name in values}
        return ExampleCall(form, inputs, min(len(args or ()), len(inputs)))
    form = graph_module._input_binding.form
    if args is None and kwargs is None:
        inputs = _accepted_inputs(graph_module)
        first = {one.name for one in form.parameters if one.positional and (one.required or not one.keyword)}
    else:
        inputs = graph_module._input_binding.bound(tuple(args or ()), dict(kwargs or {}))
        first = {one.name for one in [one for one in form.parameters if one.positional][: len(args or ())]}
    return ExampleCall(form, inputs, len(list(takewhile(first.__contains__, inputs))))


def _accepted_inputs(graph_module: CapturedModule) -> dict[str, object]:
    """Return inputs of the sizes of the capture by name, as far as the captured module still accepts them."""
    guards, placeholders = guards_of(graph_module), graph_module.graph.find_nodes(op="placeholder")
    leaves = [
        _example(spec, node.meta.get("val"), guards.module_dtype)
        for spec, node in zip(guards.specs, placeholders, strict=False)
    ]
    if not guards.accepts(leaves):
        raise CaptureError(f"the sizes of the capture are unknown, as after a pickle, or no longer accepted; {_GIVE}")
    return inputs_by_name(graph_module.graph, leaves)


def _example(spec: InputSpec, value: Any, moved: torch.dtype | None) -> object:
    """Return an example of an input, in the sizes that `value` had at the capture."""
    if spec.kind is None or not isinstance(value, torch.Tensor):
        return spec.value
    shape: list[Any] = [*value.shape]
    # torch.export fixes sizes of 0 and 1.
    sizes = [max(2, each.node.hint or 2) if isinstance(each, torch.SymInt) else each for each in shape]
    if spec.value is not None and shape == [*spec.sizes]:
        return torch.tensor(spec.value, dtype=spec.dtype, device=value.device).view(shape)
    dtype = moved if spec.follows else value.dtype
    # Zeros are valid ids, and a valid mask unless the guards require ones.
    return torch.full(sizes, int(spec.ones is True), dtype=dtype, device=value.device)


def _dynamic_shapes(guards: InputGuards, leaves: Sequence[object]) -> ShapesCollection:
    """Return shapes in which all sizes vary that the guards leave open."""
    shapes = ShapesCollection()  # type: ignore[no-untyped-call]  # torch leaves it untyped
    for leaf, spec in zip(leaves, guards.specs, strict=True):
        dimensions = _open_dimensions(spec)
        if isinstance(leaf, torch.Tensor) and dimensions:
            small = [dimension for dimension in dimensions if leaf.size(dimension) < 2]
            if small:
                raise CaptureError(
                    f"an example input for the export has shape {tuple(leaf.shape)}, and its dimension {small[0]} is "
                    f"dynamic: give a size of 2 or more there, since torch.export treats 0 and 1 as fixed"
                )
            shapes[leaf] = dict.fromkeys(dimensions, Dim.AUTO)
    return shapes


def _open_dimensions(spec: InputSpec) -> list[int]:
    return [dimension for dimension, size in enumerate(spec.sizes) if size is None]


# -- the program


def _export_guarded(graph_module: GraphModule, call: ExampleCall, guards: InputGuards) -> ExportedProgram:
    """Export a captured module to a program with its guards.

    A captured graph has all guards that it needs, but an export may find others, which refuse sizes for which the graph
    is right: fewer if sizes of 0 and 1 are allowed, as far as torch can export that.
    """
    shapes = _dynamic_shapes(guards, pytree.tree_leaves(dict(call.inputs)))
    if strided := [spec.name for spec in guards.specs if spec.layout is not None]:
        raise CaptureError(
            f"the graph is valid for one order of strides of `{strided[0]}`, which a program of torch.export cannot "
            f"check; let the model not depend on strides, or save the graph with fxopt_capture.save"
        )
    try:
        program = _export(graph_module, call, shapes, small_sizes=True)
        _demand_dynamic(program, call, guards)
    except CaptureError:
        program = _export(graph_module, call, shapes, small_sizes=False)
        _demand_dynamic(program, call, guards)
    paths = [path for path, _ in pytree.tree_leaves_with_path(dict(call.inputs))]
    stated = [_in_terms_of(condition, paths) for condition in guards.conditions]
    assumptions(program)[:] = dict.fromkeys([*stated, *assumptions(program)])
    return program


def _export(graph_module: GraphModule, call: ExampleCall, shapes: Any, *, small_sizes: bool) -> ExportedProgram:
    """Export a graph module, which is left as it was; parameters and buffers keep their names."""
    names = list(call.inputs)
    args = tuple(call.inputs[name] for name in names[: call.positional])
    kwargs = {name: call.inputs[name] for name in names[call.positional :]}
    try:
        with ready_to_export(graph_module, small_sizes=small_sizes):
            return torch.export.export(_host(graph_module, names), args, kwargs, dynamic_shapes=shapes, strict=False)
    except CaptureError as error:  # to which the interpreter has added the node that it was at
        raise CaptureError(str(error).partition("\n\nWhile executing")[0]) from error
    except Exception as error:  # whatever torch or the graph raises while it is traced
        raise CaptureError(
            f"torch.export refuses the graph: {described(error)}. Check that the graph module runs on the inputs "
            f"(give them as args and kwargs)"
        ) from error


def _host(graph_module: GraphModule, names: Sequence[str]) -> nn.Module:
    """Return a module with the tensors and modules of a graph module, which runs its graph node by node.

    The traced operators keep the stack trace and the module stack of the node that they come from. The hooks of the
    graph module are not run, nor is what binds the arguments of a call.
    """
    host, graph = nn.Module(), graph_module.graph
    for name in ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set", "training"):
        vars(host)[name] = vars(graph_module)[name]

    def forward(*args: object, **kwargs: object) -> object:
        inputs = dict(zip(names, args, strict=False)) | kwargs
        with fx_traceback.preserve_node_meta():
            result = Interpreter(host, graph=graph).run(*_flat(graph, inputs), enable_io_processing=False)
        return graph.process_outputs(result)

    vars(host)["forward"] = taking(names, forward)
    return host


def _flat(graph: Graph, inputs: Mapping[str, object]) -> list[object]:
    if pytree_info(graph) is not None:
        return pytree.tree_leaves(list(inputs.values()))
    nodes = graph.find_nodes(op="placeholder")
    # The only argument of a placeholder is its default.
    return [inputs.get(str(node.target), next(iter(node.args), None)) for node in nodes]


def _demand_dynamic(program: ExportedProgram, call: ExampleCall, guards: InputGuards) -> None:
    """Refuse a program that fixes sizes which are dynamic in the captured module."""
    paths = [pytree.keystr(path) for path, _ in pytree.tree_leaves_with_path(dict(call.inputs))]
    given = {spec.arg.name for spec in program.graph_signature.input_specs if spec.kind.name == "USER_INPUT"}
    values = [node.meta.get("val") for node in program.graph.find_nodes(op="placeholder") if node.name in given]
    for path, value, spec in zip(paths, values, guards.specs, strict=False):
        for dimension in _open_dimensions(spec):
            size = value.shape[dimension] if isinstance(value, torch.Tensor) else None
            if size is not None and size_expression(size) is None:
                raise CaptureError(
                    f"dimension {dimension} of input {path} is dynamic in this graph module, but the program would "
                    f"hold only for size {int(size)}: give an example of 2 or more there, or, if something in the "
                    f"graph fixes it, such as a pass or an added node, `dynamic_shapes` that make it static"
                )


def _in_terms_of(code: str, paths: Sequence[pytree.KeyPath]) -> str:
    """Write a condition on ``i[0]`` as torch writes it: on ``L['input_ids']``."""
    for index, path in reversed(list(enumerate(paths))):
        code = code.replace(f"i[{index}]", f"L{pytree.keystr(path)}")
    return code
