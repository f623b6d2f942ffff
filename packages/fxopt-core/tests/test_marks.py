from __future__ import annotations

import copy
import dataclasses
import pickle

import pytest
import torch
from torch import nn
from torch.fx import Node, symbolic_trace

from fxopt_core import iter_nodes
from fxopt_core.ledger.marks import NodeTag, add_mark, forget_ids, has_mark, remove_mark, set_tag, tag_of


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
    def test_forgetting_them_keeps_the_marks(self) -> None:
        node = a_node()
        set_tag(node, NodeTag(1, ("a",)))
        forget_ids([node])
        assert tag_of(node) == NodeTag(None, ("a",))
