"""Descriptions of values with another last dimension."""

from __future__ import annotations

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx.passes.shape_prop import ShapeProp

from fxopt_rewrite.shapes.meta import resized_entries


def test_shape_metadata_gets_strides_in_a_row() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    y, z = graph.call_function(torch.relu, (x,)), graph.call_function(torch.t, (x,))
    graph.output((y, z))
    ShapeProp(GraphModule(nn.Module(), graph)).propagate(torch.ones(3, 4))
    found = [resized_entries(node, 7)["tensor_meta"] for node in (x, y, z)]
    assert [tuple(each.shape) for each in found] == [(3, 7), (3, 7), (4, 7)]
    assert {each.stride for each in found} == {(7, 1)}
