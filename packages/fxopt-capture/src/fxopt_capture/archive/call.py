"""With which inputs a graph module is exported to be saved: those that the caller gives, or what the graph knows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import torch
from torch.export import Dim, ShapesCollection
from torch.fx import GraphModule, Node
from torch.utils import _pytree as pytree

from fxopt_capture.archive.export import ArchiveCall
from fxopt_capture.call.arguments import CallForm, InputBinding, Parameter, bind_call
from fxopt_capture.call.guards import GUARDS, InputGuards
from fxopt_capture.captured import CapturedModule
from fxopt_capture.export.conditions import relations
from fxopt_capture.export.dynamic import automatic_shapes, batch_dimension, requested_shapes
from fxopt_core._torch import pytree_info
from fxopt_core.errors import CaptureError
from fxopt_core.graph import iter_nodes

_GIVE = "give example inputs to save it with: save(graph_module, path, args, kwargs)"
_TRIED = (2, 3, 4, 5, 6, 8, 10, 12, 16, 24, 32, 48, 64)


def call_to_save(
    graph_module: GraphModule, args: tuple[object, ...] | None, kwargs: Mapping[str, object] | None, dynamic_shapes: Any
) -> tuple[ArchiveCall, CallForm]:
    """Return the call that a graph module is exported with, and how it is called."""
    binding = binding_in(graph_module)
    if args is not None or kwargs is not None:
        form, inputs, positional = _given(graph_module, binding, args or (), dict(kwargs or {}))
    else:
        form, inputs, positional = _derived(graph_module, binding)
    shapes, dynamic = _shapes(graph_module, form, inputs, dynamic_shapes)
    return ArchiveCall(inputs, positional, shapes, dynamic), form


def binding_in(graph_module: GraphModule) -> InputBinding | None:
    """Return what accepts the calls of a captured module."""
    return graph_module._input_binding if isinstance(graph_module, CapturedModule) else None


def guards_in(graph_module: GraphModule) -> InputGuards | None:
    """Return the guards of a captured module."""
    guards = graph_module._modules.get(GUARDS)
    return guards if isinstance(guards, InputGuards) else None


def guards_to_state(graph_module: GraphModule, call: ArchiveCall) -> InputGuards:
    """Return what a graph module demands of its inputs, as far as exporting its graph would not find it."""
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
    """Return whether an argument is given by position: those are that have no default, or no name."""
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
    """Return zeros of the shape of a value, in which sizes that vary are those of the capture."""
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
    """Return inputs that a captured module accepts, of the shapes that its guards tell."""
    parameter = next((one for one in graph_module.parameters() if one.is_floating_point()), torch.zeros(()))
    dtypes = {"bool": torch.bool, "integer": torch.int64, "floating": parameter.dtype, "complex": torch.complex64}
    for size in _TRIED:
        leaves: list[object] = []
        for spec in guards.specs:
            if spec.kind is None:
                leaves.append(spec.value)
                continue
            sizes = [size if fixed is None else fixed for fixed in spec.sizes]
            leaves.append(torch.zeros(sizes, dtype=spec.dtype or dtypes[spec.kind], device=parameter.device))
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
                    f"an input of shape {tuple(leaf.shape)} is given to save the graph module with, and its dimension "
                    f"{small[0]} is dynamic: give a size of 2 or more there, as torch.export takes 0 and 1 for fixed"
                )
            shapes[leaf] = dict.fromkeys(dimensions, Dim.AUTO)
    return shapes, dynamic


def _dynamic_dimensions(graph_module: GraphModule) -> list[Sequence[int]] | None:
    """Return the dimensions of each input that vary, by the guards or else by its value; None where neither tells."""
    guards = guards_in(graph_module)
    if guards is not None:
        return [[dim for dim, size in enumerate(spec.sizes) if size is None] for spec in guards.specs]
    if pytree_info(graph_module.graph) is None:
        return None
    values = [node.meta.get("val") for node in iter_nodes(graph_module.graph) if node.op == "placeholder"]
    shapes = [tuple(value.shape) if isinstance(value, torch.Tensor) else () for value in values]
    return [[dim for dim, size in enumerate(shape) if type(size) is not int] for shape in shapes]
