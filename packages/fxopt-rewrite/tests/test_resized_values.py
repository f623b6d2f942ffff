"""Descriptions of values with another last dimension."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.shape_prop import ShapeProp

from fxopt_core import iter_nodes
from fxopt_rewrite.shapes.meta import resized_entries


def exported(*, dynamic: bool) -> GraphModule:
    shapes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},) if dynamic else None
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Tanh())
    found = torch.export.export(model, (torch.randn(2, 3, 4),), dynamic_shapes=shapes).module()
    assert isinstance(found, GraphModule)
    return found


def calls(graph_module: GraphModule) -> list[Node]:
    return [node for node in iter_nodes(graph_module.graph) if node.op == "call_function" and "val" in node.meta]


@pytest.mark.parametrize("dynamic", [False, True])
def test_all_but_the_last_size_stay(*, dynamic: bool) -> None:
    for node in calls(exported(dynamic=dynamic)):
        before = node.meta["val"]
        value = resized_entries(node, 10)["val"]
        assert tuple(value.shape) == (*before.shape[:-1], 10)
        assert value.fake_mode is before.fake_mode
        assert (value.dtype, value.device) == (before.dtype, torch.device("cpu"))
        assert value.is_contiguous()


def test_shape_metadata_gets_strides_in_a_row() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    y, z = graph.call_function(torch.relu, (x,)), graph.call_function(torch.t, (x,))
    graph.output((y, z))
    ShapeProp(GraphModule(nn.Module(), graph)).propagate(torch.ones(3, 4))
    found = [resized_entries(node, 7)["tensor_meta"] for node in (x, y, z)]
    assert [tuple(each.shape) for each in found] == [(3, 7), (3, 7), (4, 7)]
    assert {each.stride for each in found} == {(7, 1)}


def test_nothing_is_said_of_what_has_no_last_dimension() -> None:
    graph = Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty((), device="meta")
    assert resized_entries(node, 3) == {}
    node.meta["val"] = 5
    assert resized_entries(node, 3) == {}
