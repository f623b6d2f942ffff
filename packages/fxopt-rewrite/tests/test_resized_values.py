"""Descriptions of values with another last dimension: right for each, worked out once for those that are alike."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.passes.shape_prop import ShapeProp

from fxopt_core import iter_nodes
from fxopt_rewrite.shapes.meta import Resized


def exported(*, dynamic: bool) -> GraphModule:
    shapes = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},) if dynamic else None
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Tanh())
    found = torch.export.export(model, (torch.randn(2, 3, 4),), dynamic_shapes=shapes).module()
    assert isinstance(found, GraphModule)
    return found


def calls(graph_module: GraphModule) -> list[Node]:
    return [node for node in iter_nodes(graph_module.graph) if node.op == "call_function" and "val" in node.meta]


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, ...]]:
    """The shapes that tensors are made of."""
    shapes: list[tuple[object, ...]] = []
    original = torch.empty

    def noting(shape: tuple[object, ...], **options: object) -> torch.Tensor:
        shapes.append(shape)
        result: torch.Tensor = original(shape, **options)  # type: ignore[call-overload]  # passed on as it comes
        return result

    monkeypatch.setattr(torch, "empty", noting)
    return shapes


@pytest.mark.parametrize("dynamic", [False, True])
def test_alike_values_are_worked_out_once(made: list[tuple[object, ...]], dynamic: bool) -> None:
    nodes = [node for node in calls(exported(dynamic=dynamic)) if node.meta["val"].dim() == 3]
    assert len(nodes) >= 2
    made.clear()
    resized = Resized()
    found = [resized.entries(node, 10)["val"] for node in nodes]
    assert len(made) == 1
    for node, value in zip(nodes, found, strict=True):
        assert tuple(value.shape) == (*node.meta["val"].shape[:-1], 10)
        assert value.fake_mode is node.meta["val"].fake_mode
        assert (value.dtype, value.device) == (torch.float32, torch.device("cpu"))
        assert value.is_contiguous()
    assert len(set(map(id, found))) == len(found)  # a tensor for each


def test_other_sizes_dtypes_and_modes_are_told_apart() -> None:
    resized, one, other = Resized(), calls(exported(dynamic=True))[0], calls(exported(dynamic=True))[0]
    first = resized.entries(one, 10)["val"]
    assert tuple(resized.entries(one, 11)["val"].shape)[-1] == 11
    assert resized.entries(other, 10)["val"].fake_mode is other.meta["val"].fake_mode is not first.fake_mode
    one.meta["val"] = one.meta["val"].half()
    assert resized.entries(one, 10)["val"].dtype == torch.float16


def test_shape_metadata_gets_strides_in_a_row() -> None:
    graph = Graph()
    x = graph.placeholder("x")
    y, z = graph.call_function(torch.relu, (x,)), graph.call_function(torch.t, (x,))
    graph.output((y, z))
    ShapeProp(GraphModule(nn.Module(), graph)).propagate(torch.ones(3, 4))
    resized = Resized()
    found = [resized.entries(node, 7)["tensor_meta"] for node in (x, y, z)]
    assert [tuple(each.shape) for each in found] == [(3, 7), (3, 7), (4, 7)]
    assert {each.stride for each in found} == {(7, 1)}


def test_nothing_is_said_of_what_has_no_last_dimension() -> None:
    graph = Graph()
    node = graph.placeholder("x")
    node.meta["val"] = torch.empty((), device="meta")
    assert Resized().entries(node, 3) == {}
    node.meta["val"] = 5
    assert Resized().entries(node, 3) == {}
