from __future__ import annotations

import dataclasses

import pytest
import torch
from torch import nn
from torch.fx import GraphModule, Node, symbolic_trace

from fxopt_core import ReversibleTransformation, iter_nodes


class Mark(ReversibleTransformation):
    def __init__(self, *, number: int = 0) -> None:
        self.number = number

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        return graph_module


def a_node() -> Node:
    return next(iter_nodes(symbolic_trace(nn.ReLU()).graph))


class TestTag:
    def test_is_immutable(self) -> None:
        node = a_node()
        Mark().mark_as_transformed(node)
        with pytest.raises(dataclasses.FrozenInstanceError):
            node.meta["fxopt"].id = 3

    def test_what_others_put_in_its_place_is_no_tag(self) -> None:
        node = a_node()
        node.meta["fxopt"] = "something"
        assert not Mark().transformed(node)


class TestMarks:
    def test_marking_twice_is_marking_once(self) -> None:
        node = a_node()
        for number in (1, 1, 2):
            Mark(number=number).mark_as_transformed(node)
        assert [Mark(number=number).transformed(node) for number in (1, 2, 3)] == [True, True, False]
        Mark(number=1).mark_as_restored(node)
        assert [Mark(number=number).transformed(node) for number in (1, 2, 3)] == [False, True, False]

    def test_the_last_mark_takes_the_tag_along(self) -> None:
        node = a_node()
        Mark().mark_as_transformed(node)
        Mark().mark_as_restored(node)
        assert node.meta == {}
        with pytest.raises(ValueError, match=r"node `.*` was not transformed by Mark"):
            Mark().mark_as_restored(node)

    def test_survive_renaming_and_dead_code_elimination(self) -> None:
        graph_module = symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh()))
        node = list(iter_nodes(graph_module.graph))[1]
        Mark().mark_as_transformed(node)
        node._rename("other")
        with graph_module.graph.inserting_after(node):
            graph_module.graph.call_function(torch.relu, (node,))
        graph_module.graph.eliminate_dead_code()
        assert [node.name for node in Mark().get_transformed_nodes(graph_module)] == ["other"]
