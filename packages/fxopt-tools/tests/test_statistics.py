"""`Statistics`: what is counted, and that it adds up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node, symbolic_trace

from fxopt_core import Instrument, PassError, PassRun, Record, Refusal, Transformation, compose, instrumented, undo
from fxopt_core.passes.undo import RecordedPass
from fxopt_rewrite.index import GraphIndex
from fxopt_rewrite.journal.editor import Editor
from fxopt_rewrite.site_pass import ReversibleSitePass
from fxopt_tools.watch.pass_statistics import Size, Statistics


@dataclass(frozen=True, eq=False)
class Call:
    node: Node

    @property
    def label(self) -> str:
        return self.node.name

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.node,)


class Drop(ReversibleSitePass[Call]):
    """``relu(relu(x))`` -> ``relu(x)``, not after a sine.

    More of this docstring is of no concern here.
    """

    def match(self, index: GraphIndex) -> Iterator[Call | Refusal]:
        for node in index.nodes:
            if node.target is torch.relu and isinstance(node.args[0], Node):
                if node.args[0].target is torch.sin:
                    yield index.refuse(node.name, "filtered", "reads a sine", node)
                elif node.args[0].target is torch.relu:
                    yield Call(node)
                else:
                    yield index.refuse(node.name, "several-users", "reads something else", node)

    def rewrite(self, site: Call, edit: Editor) -> None:
        before: Any = site.node.args[0]
        edit.replace(site.node, before)


class Shrink(Transformation):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module.get_submodule("linear").register_parameter("bias", None)
        return graph_module


class Fails(Transformation):
    """Has no luck."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        raise ValueError("no luck")


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(torch.relu(torch.relu(self.linear(x))))
        return y + torch.relu(torch.sin(x))


class Vetoes(Instrument):
    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> bool:
        return False


def traced() -> GraphModule:
    return symbolic_trace(Model())


def test_sites_refusals_and_sizes_are_counted() -> None:
    statistics = Statistics()
    with instrumented(statistics):
        compose(Drop(), Shrink())(traced())
    drop, shrink = statistics.rows()
    assert (drop.name, drop.description) == (
        "drop",
        "``relu(relu(x))`` -> ``relu(x)``, not after a sine.",
    )
    assert (drop.runs, drop.rewritten, drop.refused) == (1, 2, {"several-users": 1, "filtered": 1})
    assert (drop.before.nodes, drop.after.nodes) == (9, 7)
    assert (shrink.description, shrink.rewritten, shrink.refused) == ("", 0, {})
    assert (shrink.before, shrink.after) == (Size(7, 1, 2, 80), Size(7, 1, 1, 64))


def test_reversals_are_counted_apart() -> None:
    statistics = Statistics()
    with instrumented(statistics):
        undo(Drop()(traced()))
        Drop()(Drop()(traced()), reverse=True)
    forwards, backwards = statistics.rows()
    assert (backwards.name, backwards.reverse, backwards.label) == ("drop", True, "undoing drop")
    assert (backwards.runs, backwards.rewritten, backwards.refused) == (2, 4, {})
    assert (backwards.before, backwards.after) == (forwards.after, forwards.before)


def test_what_did_not_stand_is_counted_as_such() -> None:
    statistics = Statistics()
    with instrumented(statistics):
        with instrumented(Vetoes()):
            Drop()(traced())
        Drop()(traced())
        with pytest.raises(PassError):
            Fails()(traced())
    drop, fails = statistics.rows()
    assert (drop.runs, drop.vetoed, drop.failed, drop.rewritten) == (2, 1, 0, 2)
    assert drop.before.nodes == 9  # of the run that stood
    assert (fails.runs, fails.vetoed, fails.failed) == (1, 0, 1)
    assert "drop: 1 vetoed of 2 runs" in str(statistics) and "fails: 1 failed of 1 runs" in str(statistics)


def test_the_table() -> None:
    statistics = Statistics()
    assert str(statistics) == "no pass has run"
    with instrumented(statistics):
        undo(Drop()(traced()))
    assert str(statistics).splitlines() == [
        "pass          runs  rewritten  refused   nodes  modules  parameters  bytes",
        "drop             1          2        2  9 -> 7        1           2     80",
        "undoing drop     1          2        0  7 -> 9        1           2     80",
        "",
        "drop: ``relu(relu(x))`` -> ``relu(x)``, not after a sine.",
        "drop refused: filtered 1, several-users 1",
    ]


def test_a_pass_that_is_known_by_its_record_has_no_description() -> None:
    statistics = Statistics()
    run = PassRun(RecordedPass(Record("gone", "no.such:Gone", (), "a1")), reverse=True)
    statistics.before_pass(run, traced())
    statistics.after_pass(run, traced(), Record("gone", "no.such:Gone", (), "a1"))
    assert statistics.rows()[0].description == ""


def test_sizes_count_ties_once_and_pass_over_what_is_not_there_yet() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(2, 2, bias=False)
            self.b = nn.Linear(2, 2, bias=False)
            self.b.weight = self.a.weight
            self.c = self.a
            self.lazy = nn.LazyLinear(3)

        def forward(self, x: Tensor) -> Any:
            return self.lazy(self.c(self.b(self.a(x))))

    graph_module = symbolic_trace(Tied())
    assert Size.of(graph_module) == Size(nodes=6, modules=3, parameters=3, parameter_bytes=16)
    assert Size.of(graph_module.to(torch.float16)).parameter_bytes == 8
    assert Size.of(symbolic_trace(nn.Sequential(nn.Linear(2, 3, device="meta")))).parameter_bytes == 36
