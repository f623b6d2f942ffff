"""Passes rewrite dead code, torch takes it out, and undo leaves it out."""

from __future__ import annotations

import operator
import pickle
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import ReversibleTransformation, UndoError, compose, iter_nodes, undo, undo_pass
from fxopt_rewrite import Editor, GraphIndex
from fxopt_rewrite.journal.dead import dead_nodes


class Parts(ReversibleTransformation):
    """Turns ``x - y`` into ``(x + 0) + (-y)``, of which the first part is shared where several read one value."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        editor = Editor(GraphIndex(graph_module), self)
        for node in list(iter_nodes(graph_module.graph)):
            if node.target is operator.sub:
                with editor.site(node.name):
                    first = editor.call_function(operator.add, node.args[0], 0, before=node, like=[node])
                    second = editor.call_function(operator.neg, node.args[1], before=node, like=[node])
                    editor.replace(node, editor.call_function(operator.add, first, second, before=node, like=[node]))
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        return undo_pass(graph_module, self.signature)


class Dead(nn.Module):
    """A chain that nothing reads, beside one that is returned; the dead one ends in what no pass changes."""

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        dead = x - y
        live = x - 2.0
        other = torch.relu(dead - live)
        torch.sigmoid(other)
        return live - y


def names(graph_module: GraphModule) -> list[str]:
    """Return the nodes in order."""
    return [str(node.format_node()) for node in iter_nodes(graph_module.graph)]


def cleaned(graph_module: GraphModule) -> GraphModule:
    """Return the graph module without dead code."""
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()
    return graph_module


def test_dead_nodes_are_found() -> None:
    graph = symbolic_trace(Dead()).graph
    assert sorted(node.name for node in dead_nodes(iter_nodes(graph))) == ["relu", "sigmoid", "sub", "sub_2"]


@pytest.mark.parametrize("travels", [False, True])
def test_undo_after_dead_code_was_taken_out(travels: bool) -> None:
    expected = names(cleaned(symbolic_trace(Dead())))
    graph_module = cleaned(compose(Parts(), Parts())(symbolic_trace(Dead())))
    if travels:
        graph_module = pickle.loads(pickle.dumps(graph_module))
    undo(graph_module)
    assert names(graph_module) == expected
    graph_module.graph.lint()
    x, y = torch.ones(2), torch.zeros(2)
    torch.testing.assert_close(graph_module(x, y), Dead()(x, y))


def test_undo_brings_dead_code_back_that_is_still_there() -> None:
    graph_module = symbolic_trace(Dead())
    before = names(graph_module)
    undo(Parts()(graph_module))
    assert names(graph_module) == before


def last(graph_module: GraphModule, target: object) -> Iterator[torch.fx.Node]:
    """Yield nodes with this target, the last one first."""
    return (node for node in reversed(list(iter_nodes(graph_module.graph))) if node.target is target)


def test_what_is_gone_and_was_not_dead_is_missed() -> None:
    graph_module = cleaned(Parts()(symbolic_trace(Dead())))
    node = next(last(graph_module, operator.add))
    node.replace_all_uses_with(node.all_input_nodes[0])
    graph_module.graph.erase_node(node)
    before = names(graph_module)
    with pytest.raises(UndoError, match=r"removed or replaced since|0 nodes"):
        undo(graph_module)
    assert names(graph_module) == before
