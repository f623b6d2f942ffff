"""Every node says where it came from, through several passes, copies and pickles."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from operator_swaps import Swap
from site_passes import LinearSite, PadLinear, exported
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, symbolic_trace

from fxopt_core import FxoptError, Refusal, iter_nodes, undo
from fxopt_rewrite import (
    Editor,
    GraphIndex,
    LinearCall,
    Provenance,
    ReversibleSitePass,
    provenance,
    read_linear,
)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x)) * 2


def traced() -> GraphModule:
    graph_module = symbolic_trace(Model())
    for node in iter_nodes(graph_module.graph):
        node.meta["stack_trace"] = f"line of {node.name}"
    return graph_module


def named(graph_module: GraphModule, name: str) -> Provenance:
    (node,) = (node for node in iter_nodes(graph_module.graph) if node.name == name)
    found = provenance(node)
    assert found is not None
    return found


def same(graph_module: GraphModule) -> GraphModule:
    return graph_module


def through_pickle(graph_module: GraphModule) -> GraphModule:
    loaded: GraphModule = pickle.loads(pickle.dumps(graph_module))
    return loaded


@pytest.mark.parametrize("through", [same, copy.deepcopy, through_pickle])
class TestOfNewNodes:
    def test_pass_nodes_modules_and_source(self, through: Callable[[GraphModule], GraphModule]) -> None:
        graph_module = through(PadLinear(suffix="first")(traced()))
        expected = Provenance("pad-linear", PadLinear(suffix="first").signature, ("first",), ("first",))
        assert named(graph_module, "narrow") == named(graph_module, "first_padded") == expected
        untouched = [n.name for n in iter_nodes(graph_module.graph) if provenance(n) is None]
        assert untouched == ["x", "second", "mul", "output"]

    def test_through_several_passes(self, through: Callable[[GraphModule], GraphModule]) -> None:
        graph_module = PadLinear(suffix="first_padded", rows=2)(PadLinear(suffix="first")(traced()))
        found = named(through(graph_module), "first_padded_padded")
        assert (found.pass_name, found.nodes, found.modules) == ("pad-linear", ("first_padded",), ("first_padded",))
        (source,) = found.sources
        assert (source.nodes, source.modules) == (("first",), ("first",))
        assert source.signature == PadLinear(suffix="first").signature != found.signature
        assert str(found) == "pad-linear: from first_padded (was first_padded)\n  pad-linear: from first (was first)"

    def test_renamed_in_between(self, through: Callable[[GraphModule], GraphModule]) -> None:
        graph_module = PadLinear(suffix="first")(traced())
        for node in iter_nodes(graph_module.graph):
            if node.name == "first_padded":
                node._rename("another")
        graph_module = through(PadLinear(suffix="first_padded", rows=2)(graph_module))
        assert named(graph_module, "first_padded_padded").nodes == ("another",)
        assert named(graph_module, "first_padded_padded").sources[0].nodes == ("first",)


def test_of_nodes_that_undo_brought_back() -> None:
    graph_module = PadLinear(suffix="first")(traced())
    before = named(graph_module, "first_padded")
    undo(PadLinear(suffix="first_padded", rows=2)(graph_module))
    assert named(graph_module, "first_padded") == before
    undo(graph_module)
    assert not [node for node in iter_nodes(graph_module.graph) if provenance(node)]


def test_of_a_pass_that_only_marks() -> None:
    graph_module = Swap("mul", "add")(traced())
    found = named(graph_module, "mul")
    assert (found.pass_name, found.nodes) == ("swap", ("mul",))
    assert found.signature == Swap("mul", "add").signature


def test_without_a_ledger_what_the_node_says_is_left() -> None:
    graph_module = Swap("mul", "add")(PadLinear(suffix="first")(traced()))
    graph_module.meta["fxopt"] = None
    assert named(graph_module, "mul").pass_name is None
    assert named(graph_module, "mul").signature == Swap("mul", "add").signature
    assert str(named(graph_module, "mul")) == "an unknown pass: from nothing"
    found = named(graph_module, "first_padded")
    assert (found.pass_name, found.signature, found.nodes) == (
        "pad-linear",
        PadLinear(suffix="first").signature,
        ("first",),
    )


def test_in_a_graph_without_an_owner() -> None:
    graph_module, graph = PadLinear(suffix="first")(traced()), Graph()
    graph.output(graph.graph_copy(graph_module.graph, {}))
    found = [provenance(node) for node in iter_nodes(graph)]
    assert [each and each.nodes for each in found] == [None, ("first",), ("first",), None, None, None]


def test_stack_traces_and_module_stacks_stay() -> None:
    graph_module = exported(Model(), torch.ones(1, 2))
    before = {node.name: dict(node.meta) for node in iter_nodes(graph_module.graph)}
    PadLinear()(graph_module)
    made = [node for node in iter_nodes(graph_module.graph) if provenance(node)]
    assert len(made) == 4
    for node in made:
        found = provenance(node)
        assert found is not None
        original = before[found.nodes[0]]
        assert node.meta["stack_trace"] == original["stack_trace"] and "forward" in node.meta["stack_trace"]
        assert node.meta["nn_module_stack"] == original["nn_module_stack"]
        assert [source.name for source in node.meta["from_node"]] == list(found.nodes)


def test_all_nodes_in_linear_time(steps_of: Callable[[Callable[[], object]], int]) -> None:
    def work(count: int) -> Callable[[], object]:
        graph_module = PadLinear()(symbolic_trace(nn.Sequential(*(nn.Linear(1, 1) for _ in range(count)))))
        return lambda: [provenance(node) for node in iter_nodes(graph_module.graph)]

    assert steps_of(work(40)) < 2.5 * steps_of(work(20))


@pytest.mark.parametrize("given", [None, 3, "relu", symbolic_trace(nn.ReLU())])
def test_other_things_than_nodes_are_refused(given: Any) -> None:
    with pytest.raises(
        FxoptError, match=rf"^provenance is given an? {type(given).__name__}, expected a torch\.fx\.Node"
    ):
        provenance(given)


class Renewed(ReversibleSitePass[LinearSite]):
    """``linear(x)`` -> ``linear(x)``, by another node."""

    def match(self, index: GraphIndex) -> Iterator[LinearSite | Refusal]:
        """Yield every layer."""
        calls = (read_linear(index, node) for node in index.nodes)
        yield from (LinearSite(call) for call in calls if isinstance(call, LinearCall))

    def check(self, site: LinearSite, index: GraphIndex) -> Refusal | None:
        """Refuse nothing."""
        return None

    def rewrite(self, site: LinearSite, edit: Editor) -> None:
        """Call the same layer."""
        node = site.call.node
        edit.replace(node, edit.call_module(str(node.target), node.args[0], before=node, like=[node]))


def test_a_node_may_be_renewed_any_number_of_times() -> None:
    """torch's own notes of origin copy the earlier ones deeply, until Python's stack ends."""
    graph_module = symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    for _ in range(250):
        Renewed()(graph_module)
    assert len(list(iter_nodes(graph_module.graph))) == 3
