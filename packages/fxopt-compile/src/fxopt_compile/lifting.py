"""Dynamo's graphs, in which all tensors are inputs, as graph modules whose weights are attributes, and back."""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.nn.parameter import Buffer

from fxopt_compile._torch import set_grad_enabled
from fxopt_core import iter_nodes
from fxopt_rewrite import GraphIndex

#: A step of dynamo's path of a tensor: `L['self']._modules['q']._parameters['weight']`.
_STEP = re.compile(r"\._(modules|parameters|buffers)\['([^']+)'\]")
_IN_PLACE: dict[Any, str] = {
    operator.iadd: "add_",
    operator.isub: "sub_",
    operator.imul: "mul_",
    operator.itruediv: "div_",
}
_PLAIN = (Tensor, nn.Parameter, Buffer)
#: A module or tensor of such a name would hide an attribute of the graph module.
_NAMED_BY_TORCH = frozenset(dir(GraphModule(nn.Module(), Graph())))


@dataclass(frozen=True)
class Weight:
    """A parameter or buffer of the model among the inputs of a graph.

    Attributes:
        place: its place among the inputs.
        name: its full name in the model, or, where that is taken or unknown, dynamo's name of the input.
    """

    place: int
    name: str


@dataclass(frozen=True)
class Inputs:
    """What the inputs of a graph are.

    Attributes:
        weights: the parameters and buffers that may become attributes.
        sharded: the names of inputs that are tensors of a subclass, or that FSDP manages.
    """

    weights: tuple[Weight, ...]
    sharded: tuple[str, ...]

    @classmethod
    def of(cls, graph_module: GraphModule, values: Sequence[object]) -> Inputs:
        """Read the inputs of dynamo's graph."""
        nodes = [node for node in iter_nodes(graph_module.graph) if node.op == "placeholder"]
        weights, sharded, taken = [], [], set[str]()
        for place, (node, value) in enumerate(zip(nodes, values, strict=True)):
            source = getattr(node, "_dynamo_source", None)
            path = "" if source is None else str(source.name)
            if not isinstance(value, Tensor):
                continue
            if type(value) not in _PLAIN or (source is not None and source.guard_source.is_fsdp_module()):
                sharded.append(_name_of(path) or node.name)
            elif (isinstance(value, nn.Parameter) or "._buffers[" in path) and not value.is_inference():
                weights.append(Weight(place, _take(_name_of(path), node.name, taken)))
        return cls(tuple(weights), tuple(sharded))


def _take(name: str | None, otherwise: str, taken: set[str]) -> str:
    """Return a name if it is free, and else another; add it, and the modules that hold it with a dot, to those taken.

    No name may be that of a tensor and of a module.
    """
    # From `a.b.c`: the modules `a` and `a.b`, and the whole name.
    *owners, name = accumulate((name or otherwise).split("."), "{}.{}".format)
    if name in taken or f"{name}." in taken or not taken.isdisjoint(owners):
        owners, name = [], otherwise
    taken.update((name, *(f"{owner}." for owner in owners)))
    return name


def _name_of(path: str) -> str | None:
    """Return the full name in a model that dynamo's path of a tensor ends with; None if the path is not in a model."""
    steps = list(_STEP.finditer(path))
    if not steps or steps[-1].end() != len(path) or steps[-1][1] == "modules":
        return None
    gaps = (path[one.end() : other.start()] for one, other in pairwise(steps))
    names = [step[2] for step in steps]
    if any(gaps) or names[0] in _NAMED_BY_TORCH or any("." in name for name in names):
        return None
    return ".".join(names)


def alias_of(weight: Tensor) -> Tensor:
    """Return another tensor of the same memory and version, which does not keep the model's own alive."""
    alias = weight.detach()
    return nn.Parameter(alias, weight.requires_grad) if isinstance(weight, nn.Parameter) else alias


def with_attributes(graph_module: GraphModule, weights: Mapping[Weight, Tensor]) -> GraphModule:
    """Return a copy of dynamo's graph module in which these weights are attributes."""
    root, graph, inputs = nn.Module(), Graph(), 0
    by_place = {weight.place: weight for weight in weights}
    copies: dict[Node, Node] = {}
    for node in iter_nodes(graph_module.graph):
        weight = None
        if node.op == "placeholder":
            weight, inputs = by_place.get(inputs), inputs + 1
        elif node.op in ("get_attr", "call_module"):
            first = str(node.target).partition(".")[0]
            setattr(root, first, getattr(graph_module, first))
        if weight is None:
            copy = graph.node_copy(node, copies.__getitem__)
            _spell_as_export(copy, node.meta.get("example_value"))
        else:
            _register(root, weight.name, weights[weight])
            copy = graph.create_node("get_attr", weight.name, name=node.name)
        copy.meta = {key: value for key, value in node.meta.items() if key != "grapharg"}
        if "example_value" in copy.meta:
            copy.meta.setdefault("val", copy.meta["example_value"])
        copies[node] = copy
    return GraphModule(root.eval(), graph)


def _spell_as_export(node: Node, value: object) -> None:
    """Write ``x += y`` and ``x.to(dtype=d)`` as export does: passes at the borders of regions know these forms."""
    method = _IN_PLACE.get(node.target) if node.op == "call_function" and isinstance(value, Tensor) else None
    if method is not None and isinstance(node.args[0], Node):
        node.op, node.target = "call_method", method
    elif node.op == "call_method" and node.target == "to" and list(node.kwargs) == ["dtype"] and len(node.args) == 1:
        node.args, node.kwargs = (*node.args, node.kwargs["dtype"]), {}


def _register(root: nn.Module, name: str, value: Tensor) -> None:
    *path, last = name.split(".")
    for part in path:
        if part not in root._modules:
            root.add_module(part, nn.Module())
        root = root.get_submodule(part)
    if isinstance(value, nn.Parameter):
        root.register_parameter(last, value)
    else:
        root.register_buffer(last, value)


def lift_again(graph_module: GraphModule, aliases: Mapping[int, Weight]) -> tuple[Weight, ...]:
    """Make the weights that a rewritten graph still reads itself its inputs, before all others; return them.

    Args:
        graph_module: the rewritten one, which is edited in place: passes may have replaced its code generator.
        aliases: the weights, by the id of the tensor that stands for each.
    """
    graph, inputs, index = graph_module.graph, dict[Weight, Node](), GraphIndex(graph_module)
    nodes = index.nodes
    for node in nodes:
        weight = aliases.get(id(index.attribute_of(node)))
        if weight is None:
            continue
        if weight not in inputs:
            with graph.inserting_before(nodes[0]):
                inputs[weight] = graph.placeholder(node.name)
            inputs[weight].meta = dict(node.meta)
        node.replace_all_uses_with(inputs[weight])
        # The first node marks the place of the new inputs, and is erased last.
        if node is not nodes[0]:
            graph.erase_node(node)
    if nodes[0].op == "get_attr" and not nodes[0].users:
        graph.erase_node(nodes[0])
    graph_module.recompile()
    # Weights go under their original names, too, where nothing reads them there any more.
    called = {str(node.target) for node in iter_nodes(graph_module.graph) if node.op in ("call_module", "get_attr")}
    modules = dict(graph_module.named_modules())
    for weight in aliases.values():
        owner, _, last = weight.name.rpartition(".")
        if owner in modules and not {owner, weight.name} & called:
            for table in (modules[owner]._parameters, modules[owner]._buffers):
                table.pop(last, None)
    return tuple(inputs)


def enables_gradients(graph_module: GraphModule) -> bool:
    """Return whether a graph turns gradients on itself."""
    return any(node.target is set_grad_enabled and node.args[:1] != (False,) for node in iter_nodes(graph_module.graph))
