"""Graph modules with what copies and pickles easily lose: ties, buffers, hooks, subclasses, nested graphs."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule

from fxopt_core import iter_nodes


def hook(*_: object) -> None:
    pass


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.tied = nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.tied.weight = self.linear.weight
        self.shift: Tensor
        self.register_buffer("shift", torch.ones(3), persistent=False)
        self.register_buffer("wide", torch.arange(3.0).expand(2, 3))
        self.constant = torch.arange(3.0)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:
        z = self.tied(self.norm(self.linear(x))) + self.shift + self.constant
        return z if y is None else torch.add(z, y)


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.bias = nn.Parameter(torch.randn(3), requires_grad=False)

    def forward(self, x: Any) -> Any:
        y = F.linear(x, self.weight, bias=self.bias).to(torch.float64, memory_format=torch.contiguous_format)
        return {"a": [y[:, slice(None, 2)], torch.cat([y, y], dim=1)], "b": operator.mul(y, 2.5), "c": y.div(3.0)}


class Tagged(GraphModule):
    """A subclass with a constructor of its own."""

    def __init__(self, root: nn.Module, graph: Graph, tag: str) -> None:
        super().__init__(root, graph)
        self.tag = tag
        self.register_forward_hook(self.note)

    def note(self, *_: object) -> None:
        self.noted = True


def traced() -> Any:
    """Calls of modules, one of them in eval mode with a hook, one unused."""
    graph_module: Any = torch.fx.symbolic_trace(Block(), concrete_args={"y": None})
    graph_module._non_persistent_buffers_set.add("shift")  # which tracing forgets
    graph_module.linear.eval()
    graph_module.unused = nn.ReLU()
    graph_module.linear.register_forward_hook(hook)
    return graph_module


def functional() -> Any:
    """Calls of functions and methods, with a structure of outputs."""
    return torch.fx.symbolic_trace(Functional())


def subclass() -> Any:
    """A subclass of `GraphModule`, with a hook bound to it."""
    base = functional()
    return Tagged(base, base.graph, "tag")


def nested() -> Any:
    """A graph module in another one, with a node that nothing reads."""
    inner, graph = traced(), Graph()
    inner.note, inner.meta["inner"] = "inner", 1
    first = next(iter_nodes(inner.graph))
    with inner.graph.inserting_after(first):
        inner.graph.call_function(torch.neg, (first,), name="never_used")
    inner.recompile()
    x = graph.placeholder("x", type_expr=torch.Tensor)
    graph.output(graph.call_module("inner", (x,)))
    return GraphModule({"inner": inner}, graph, "Outer")


SAMPLES: list[Callable[[], Any]] = [traced, functional, subclass, nested]


def node_rows(graph: Graph) -> list[tuple[object, ...]]:
    """All fields of all nodes, by value."""
    return [
        (n.op, str(n.target), str(n.args), str(n.kwargs), n.name, n.type, str(n.users), str(n._input_nodes))
        for n in iter_nodes(graph)
    ]


def tensor_rows(graph_module: GraphModule) -> list[tuple[object, ...]]:
    """All of the parameters and buffers, by value."""
    parameters = graph_module.named_parameters(remove_duplicate=False)
    tensors = [*parameters, *graph_module.named_buffers(remove_duplicate=False)]
    fields = [(name, type(t), t.dtype, t.stride(), t.requires_grad, t.tolist()) for name, t in tensors]
    return [(*row, str(t.grad), str(vars(t))) for row, (_, t) in zip(fields, tensors, strict=True)]


def same(left: Any, right: Any) -> bool:
    """Whether two results are equal, tensor for tensor."""
    flat = [torch.utils._pytree.tree_leaves(result) for result in (left, right)]
    return all(torch.equal(a, b) for a, b in zip(*flat, strict=True))


def mutable_parts(graph_module: Any) -> set[int]:
    """Ids of all that can change: modules, their dictionaries, tensors, memory, nodes, their dictionaries, graphs."""
    parts: list[Any] = []
    storages = []
    for module in graph_module.modules():
        parts += [module, vars(module), *(v for v in vars(module).values() if isinstance(v, (dict, list, set)))]
        parts += [v for v in vars(module).values() if isinstance(v, torch.Tensor)]
        if isinstance(module, GraphModule):
            graph = module.graph
            parts += [type(module), graph, vars(graph), graph._codegen, graph._graph_namespace, graph._root]
            for node in iter_nodes(graph):
                parts += [node, node.meta, node.users]
    for tensor in [*graph_module.parameters(), *graph_module.buffers()]:
        parts.append(tensor)
        storages.append(tensor.untyped_storage()._cdata)
    return {id(part) for part in parts} | set(storages)


def state(graph_module: GraphModule) -> list[object]:
    """Structure and identities, as far as a test can compare them."""
    rows: list[object] = [graph_module.code, id(graph_module.graph), dict(graph_module.meta), type(graph_module)]
    rows += [node_rows(graph_module.graph), [dict(node.meta) for node in iter_nodes(graph_module.graph)]]
    for name, module in graph_module.named_modules():
        tensors = [(key, id(tensor)) for key, tensor in (*module._parameters.items(), *module._buffers.items())]
        rows.append((name, id(module), module.training, tensors, sorted(module._non_persistent_buffers_set)))
    return [*rows, tensor_rows(graph_module)]
