from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn
from torch.fx import Node, symbolic_trace

from fxopt_core.graph import TargetNodes, iter_nodes
from fxopt_core.marks import NodeTag, add_mark, forget_ids, has_mark, nodes_by_id, remove_mark, set_tag, tag_of


def a_node() -> Node:
    return next(iter_nodes(symbolic_trace(nn.ReLU()).graph))


class TestNodeTag:
    def test_is_immutable(self) -> None:
        with pytest.raises(dataclasses.FrozenInstanceError):
            NodeTag().id = 3  # type: ignore[misc]  # that is the point

    def test_copies_are_the_tag_itself_and_pickles_are_equal(self) -> None:
        tag = NodeTag(3, ("a", "b"), ("merge-linears", ("q", "k")))
        assert copy.deepcopy(tag) is tag
        assert pickle.loads(pickle.dumps(tag)) == tag

    def test_an_empty_tag_leaves_no_trace(self) -> None:
        node = a_node()
        set_tag(node, NodeTag())
        assert node.meta == {}

    def test_what_others_put_in_its_place_is_no_tag(self) -> None:
        node = a_node()
        node.meta["fxopt"] = "something"
        assert tag_of(node) == NodeTag()


class TestMarks:
    def test_marking_twice_is_marking_once(self) -> None:
        node = a_node()
        for _ in range(2):
            add_mark(node, "a")
        add_mark(node, "b")
        assert tag_of(node).marks == ("a", "b")
        assert (has_mark(node, "a"), has_mark(node, "c")) == (True, False)

    def test_the_last_mark_takes_the_tag_along(self) -> None:
        node = a_node()
        add_mark(node, "a")
        assert remove_mark(node, "a")
        assert not remove_mark(node, "a")
        assert node.meta == {}

    def test_are_not_shared_by_nodes_that_share_a_tag(self) -> None:
        one, other = a_node(), a_node()
        add_mark(one, "a")
        other.meta = dict(one.meta)
        remove_mark(other, "a")
        assert has_mark(one, "a")

    def test_survive_renaming_dead_code_elimination_and_saving(self) -> None:
        graph_module = symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh()))
        node = list(iter_nodes(graph_module.graph))[1]
        add_mark(node, "a")
        node._rename("other")
        with graph_module.graph.inserting_after(node):
            graph_module.graph.call_function(torch.relu, (node,))
        graph_module.graph.eliminate_dead_code()
        assert [n.name for n in iter_nodes(graph_module.graph) if has_mark(n, "a")] == ["other"]


class TestNumbers:
    def test_nodes_by_id_lists_all_that_share_one(self) -> None:
        graph = symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh())).graph
        x, relu, tanh, _ = iter_nodes(graph)
        set_tag(x, NodeTag(0))
        set_tag(relu, NodeTag(7))
        tanh.meta = dict(relu.meta)
        assert nodes_by_id(graph) == {0: [x], 7: [relu, tanh]}

    def test_forgetting_them_keeps_the_marks(self) -> None:
        node = a_node()
        set_tag(node, NodeTag(1, ("a",)))
        forget_ids([node])
        assert tag_of(node) == NodeTag(None, ("a",))


def test_target_nodes_follow_edits() -> None:
    graph = symbolic_trace(nn.Sequential(nn.ReLU(), nn.Linear(1, 1))).graph
    targets = TargetNodes(graph)
    (relu,) = targets.of("call_module", "0")
    with graph.inserting_before(relu):
        other = graph.call_module("0", relu.args)
        targets.add(other)
    assert targets.of("call_module", "0") == [relu, other]
    targets.discard(relu)
    targets.discard(next(iter_nodes(graph)))
    assert targets.of("call_module", "0") == [other]
    assert targets.of("get_attr", "1.weight") == []
