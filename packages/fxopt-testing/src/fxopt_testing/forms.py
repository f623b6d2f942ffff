"""The forms of graph in which a pass may get a model."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from torch import SymInt, Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxopt_capture import capture
from fxopt_core import iter_nodes, type_text
from fxopt_rewrite import infer_shapes
from fxopt_tools import Inputs

#: ``modules``: calls of modules, as `torch.fx.symbolic_trace` leaves them. ``functions``: functions and methods, with
#: parameters as ``get_attr`` nodes. ``export``: the aten graph of `torch.export`; ``export-dynamic``: with a dynamic
#: batch. ``capture``: the graph of `fxopt_capture.capture`. ``graph``: the model is a graph module already.
Form: TypeAlias = Literal["modules", "functions", "export", "export-dynamic", "capture", "graph"]

TRACED: tuple[Form, ...] = ("modules", "functions")
FORMS: tuple[Form, ...] = (*TRACED, "export", "export-dynamic", "capture", "graph")


class ModuleTracer(torch.fx.Tracer):
    """Leaves torch's own modules whole; buffers that a model reads itself are nodes, not constants."""

    proxy_buffer_attributes = True
    # torch records none by default; the property `traces_kept` checks that passes keep them.
    record_stack_traces = True

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Leave graph modules and subclasses of layers whole too: passes have to tell them from layers."""
        # `nn.Module` itself is of torch.nn.modules: with it, every module would be a layer.
        classes = (cls for cls in type(m).__mro__ if cls is not nn.Module)
        is_layer = any(cls.__module__.startswith("torch.nn.modules") for cls in classes)
        is_container = isinstance(m, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
        return isinstance(m, GraphModule) or (is_layer and not is_container)


class FunctionTracer(ModuleTracer):
    """Traces into torch's own modules, so that the graph has functions and ``get_attr`` nodes."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Go into every module."""
        return False

    def to_bool(self, obj: object) -> bool:
        """Skip branches that only raise errors: batch norm checks the rank of its input."""
        return False


def graph_of(model: nn.Module, form: Form, inputs: Inputs) -> GraphModule:
    """Return a model as a graph that shares its modules and tensors, with shapes known."""
    if not form.startswith("export"):
        return traced(model, form, inputs)
    graph_module = exported(model, form, inputs).module()
    assert isinstance(graph_module, GraphModule)
    return graph_module


def traced(model: nn.Module, form: Form, inputs: Inputs) -> GraphModule:
    """Return a model as a graph of one of the traced forms, or captured, with shapes known."""
    if form == "graph":
        if not isinstance(model, GraphModule):
            raise TypeError(f"the form is `graph`, and the model is {type_text(model)}, expected a GraphModule")
        return model
    if form == "capture":
        return capture(model, inputs.args, inputs.kwargs or None)
    graph_module = traced_by(ModuleTracer() if form == "modules" else FunctionTracer(), model)
    return infer_shapes(graph_module, *inputs.args, **inputs.kwargs)


def sizes_from_values(graph_module: GraphModule, where: Callable[[int], bool] = lambda dim: dim == 0) -> GraphModule:
    """Mark sizes in a graph as coming from values of tensors, as in a vision model, and return the graph.

    Torch raises where such sizes are compared by ``==``. Equal sizes become equal ones; what the graph computes stays.

    Args:
        graph_module: a graph with shapes known.
        where: tells of a dimension whether its size comes from a value; all symbolic sizes do.

    >>> graph_module = sizes_from_values(graph_of(nn.Linear(4, 2), "modules", Inputs(torch.ones(3, 4))))
    >>> next(iter_nodes(graph_module.graph)).meta["val"].shape
    torch.Size([u0, 4])
    """
    env = ShapeEnv()
    mode, sizes = FakeTensorMode(shape_env=env), dict[str, SymInt]()
    made: dict[object, Tensor] = {}  # to describe a tensor takes a millisecond, and most nodes have one of a few shapes

    def size_of(size: int | SymInt) -> SymInt:
        if str(size) not in sizes:
            sizes[str(size)] = env.create_unbacked_symint()
        return sizes[str(size)]

    def described(value: Tensor | SymInt) -> Tensor | SymInt:
        if not isinstance(value, Tensor):
            return size_of(value)
        known = [type(size) is int and not where(dim) for dim, size in enumerate(value.shape)]
        shape = [size if is_known else size_of(size) for size, is_known in zip(value.shape, known, strict=True)]
        kind = str(shape), value.dtype, value.device
        if kind not in made:
            with mode:
                made[kind] = torch.empty(shape, dtype=value.dtype, device=value.device)
        return made[kind]

    for node in iter_nodes(graph_module.graph):
        if node.op != "get_attr" and "val" in node.meta:
            node.meta["val"] = torch.utils._pytree.tree_map_only((Tensor, SymInt), described, node.meta["val"])
    return graph_module


def traced_by(tracer: torch.fx.Tracer, model: nn.Module) -> GraphModule:
    """Return the graph module that a tracer makes of a model."""
    graph_module = GraphModule(model, tracer.trace(model))
    graph_module.training = model.training
    for node in iter_nodes(graph_module.graph):
        if isinstance(node.type, str):  # an annotation that was never evaluated, with which torch cannot pickle
            node.type = None
    graph_module.recompile()
    return graph_module


def exported(model: nn.Module, form: Form, inputs: Inputs) -> ExportedProgram:
    """Return a model as an exported program."""
    dynamic = None
    if form == "export-dynamic":
        arguments = inspect.signature(model.forward).bind(*inputs.args, **inputs.kwargs).arguments
        # AUTO: torch fixes such a size where the model demands one, and raises for a named `Dim`.
        dynamic = {
            name: {0: torch.export.Dim.AUTO} if isinstance(value, torch.Tensor) and value.dim() > 1 else None
            for name, value in arguments.items()
        }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about itself
        return torch.export.export(
            model,
            inputs.args,
            inputs.kwargs or None,
            dynamic_shapes=dynamic,
            strict=False,
            preserve_module_call_signature=(),
        )
