"""Graphs that are generated node by node, in each form of graph, with a given number of sites for a pass."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, GraphModule, Node

WIDTH = 4
FORMS = ("modules", "functions", "aten")


class Drawing:
    """A graph that is generated node by node, in one of the forms of graph."""

    def __init__(self, form: str) -> None:
        self.form, self.graph, self.root = form, Graph(), nn.Module()

    def layer(self, module: nn.Module, name: str, x: Node) -> Node:
        """A call of a layer."""
        block, _, key = name.partition(".")
        if block not in self.root._modules:
            self.root.add_module(block, nn.Module())
        self.root._modules[block].add_module(key, module)  # type: ignore[union-attr]  # it was put there
        if self.form == "modules":
            return self.graph.call_module(name, (x,))
        keys = ("weight", "bias") if isinstance(module, (nn.Linear, nn.Conv2d)) else _NORM_KEYS
        tensors = [self.graph.get_attr(f"{name}.{key}") for key in keys]
        if isinstance(module, nn.Linear):
            return self.graph.call_function(
                F.linear if self.form == "functions" else _ATEN.linear.default, (x, *tensors)
            )
        if isinstance(module, nn.Conv2d):
            convolve = torch.conv2d if self.form == "functions" else _ATEN.conv2d.default
            return self.graph.call_function(convolve, (x, *tensors, [1, 1], [0, 0], [1, 1], 1))
        weight, bias, mean, var = tensors
        if self.form == "functions":
            return self.graph.call_function(F.batch_norm, (x, mean, var, weight, bias, False, 0.1, 1e-5))
        return self.graph.call_function(_ATEN.batch_norm.default, (x, weight, bias, mean, var, False, 0.1, 1e-5, True))

    def call(self, name: str, *args: Any) -> Node:
        """A call of an operation without parameters."""
        plain: dict[str, Callable[..., Any]] = {"relu": torch.relu, "add": operator.add, "div": operator.truediv}
        overloads = {"relu": _ATEN.relu.default, "add": _ATEN.add.Tensor, "div": _ATEN.div.Tensor}
        return self.graph.call_function((overloads if self.form == "aten" else plain)[name], args)

    def done(self, result: Any, rank: int) -> GraphModule:
        """The graph module, with shapes."""
        self.graph.output(result)
        value = torch.empty((2, WIDTH, 3, 3)[:rank], device="meta")
        for node in self.graph.nodes:
            if node.op != "output":
                node.meta["val"] = value
        graph_module = GraphModule(self.root.eval(), self.graph)
        graph_module.eval()
        return graph_module


_ATEN = torch.ops.aten
_NORM_KEYS = ("weight", "bias", "running_mean", "running_var")


def drawn(name: str, form: str, nodes: int, share: float, hub: bool) -> GraphModule:
    """A graph for a pass.

    Args:
        name: the pass.
        form: modules, functions or aten.
        nodes: about how many nodes it has.
        share: how many of them belong to sites; the others are activations.
        hub: whether all sites read one value, rather than each the one before.
    """
    drawing = Drawing(form)
    first = x = drawing.graph.placeholder("x")
    results = []
    while len(drawing.graph.nodes) < nodes:
        before = len(drawing.graph.nodes)
        x = _site(drawing, name, first if hub else x, before)
        results.append(x)
        used = len(drawing.graph.nodes) - before
        idle = int(used / share) - used if share else nodes
        for _ in range(min(idle, nodes - len(drawing.graph.nodes))):
            x = drawing.call("relu", x)
    return drawing.done(tuple(results) if hub else x, 4 if "conv" in name else 2)


def _site(drawing: Drawing, name: str, x: Node, number: int) -> Node:
    def linear(key: str) -> Node:
        return drawing.layer(nn.Linear(WIDTH, WIDTH), f"block{number}.{key}", x)

    if name == "merge-linears":
        return drawing.call("add", drawing.call("add", linear("q"), linear("k")), linear("v"))
    if name == "fuse-bias-in-linear":
        return drawing.call("relu", linear("a"))
    if name == "change-true-div-to-mul-by-inverse":
        return drawing.call("relu", drawing.call("div", x, 3.0))
    if name == "fuse-batch-norm1d-in-linear":
        return drawing.layer(nn.BatchNorm1d(WIDTH), f"block{number}.norm", linear("a"))
    y = drawing.layer(nn.Conv2d(WIDTH, WIDTH, 1), f"block{number}.conv", x)
    return drawing.layer(nn.BatchNorm2d(WIDTH), f"block{number}.norm", y)
