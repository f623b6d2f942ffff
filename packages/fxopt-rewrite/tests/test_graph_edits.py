"""What an editor keeps of a graph follows its edits."""

from __future__ import annotations

from torch import nn
from torch.fx import symbolic_trace

from fxopt_core import (
    NodeTag,
    iter_nodes,
    set_tag,
)
from fxopt_rewrite.journal.graph_edits import TargetNodes, nodes_by_id


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


def test_nodes_by_id_lists_all_that_share_one() -> None:
    graph = symbolic_trace(nn.Sequential(nn.ReLU(), nn.Tanh())).graph
    x, relu, tanh, _ = iter_nodes(graph)
    set_tag(x, NodeTag(0))
    set_tag(relu, NodeTag(7))
    tanh.meta = dict(relu.meta)
    assert nodes_by_id(graph) == {0: [x], 7: [relu, tanh]}
