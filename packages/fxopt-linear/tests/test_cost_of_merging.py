"""What merging costs, in steps: in proportion to the graph, and little beside lint and recompile for few sites."""

from __future__ import annotations

import operator

import pytest
import torch
import torch.nn.functional as F
from step_counts import count_steps
from torch import nn
from torch.fx import Graph, GraphModule, Node

from fxopt_core import history
from fxopt_linear import FuseBiasInLinear, MergeLinears

FORMS = ("modules", "functions", "aten")


def attentions(form: str, count: int, *, hub: bool = False, idle: int = 0) -> GraphModule:
    """Groups of three layers, one after the other or all on one value, with activations between them."""
    graph, root = Graph(), nn.Module()
    first = x = graph.placeholder("x")
    for number in range(count):
        block = nn.Module()
        root.add_module(f"block{number}", block)
        results = [layer(graph, form, block, f"block{number}", key, first if hub else x) for key in "qkv"]
        x = graph.call_function(operator.add, (graph.call_function(operator.add, (results[0], results[1])), results[2]))
        for _ in range(idle):
            x = graph.call_function(torch.relu, (x,))
    graph.output(x)
    graph_module = GraphModule(root.eval(), graph)
    graph_module.eval()
    return graph_module


def layer(graph: Graph, form: str, block: nn.Module, owner: str, key: str, x: Node) -> Node:
    block.add_module(key, nn.Linear(2, 2))
    name = f"{owner}.{key}"
    if form == "modules":
        return graph.call_module(name, (x,))
    tensors = (graph.get_attr(f"{name}.weight"), graph.get_attr(f"{name}.bias"))
    return graph.call_function(F.linear if form == "functions" else torch.ops.aten.linear.default, (x, *tensors))


@pytest.mark.parametrize("hub", [False, True], ids=["chain", "hub"])
@pytest.mark.parametrize("transformation", [MergeLinears(), FuseBiasInLinear()], ids=["merge", "fuse"])
def test_twice_the_graph_takes_twice_the_steps(transformation: MergeLinears | FuseBiasInLinear, hub: bool) -> None:
    def steps(count: int) -> int:
        graph_module = attentions("modules", count, hub=hub)
        found = count_steps(lambda: transformation(graph_module, lint_and_recompile=False))
        assert history(graph_module)[-1].rewrites
        return found

    steps(4)  # what is looked up once
    assert steps(80) < 2.2 * steps(40)


def test_few_sites_cost_less_than_lint_and_recompile() -> None:
    graph_module = attentions("modules", 8, idle=140)
    MergeLinears()(attentions("modules", 2), lint_and_recompile=False)  # what is looked up once
    compiled = count_steps(graph_module.graph.lint) + count_steps(graph_module.recompile)
    assert count_steps(lambda: MergeLinears()(graph_module, lint_and_recompile=False)) < compiled
    assert len(history(graph_module)[-1].rewrites) == 8
