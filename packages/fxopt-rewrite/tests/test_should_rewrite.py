"""Instruments decide on single sites: `should_rewrite`."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from site_passes import negated
from torch.fx import GraphModule, Node

from fxopt_core import (
    Instrument,
    PassRun,
    Record,
    Transformation,
    compose,
    history,
    instrumented,
    iter_nodes,
    undo,
)
from fxopt_rewrite import REASONS, Editor, GraphIndex, ReversibleSitePass


@dataclass(frozen=True)
class Negation:
    node: Node

    @property
    def label(self) -> str:
        return f"site {self.node.name}"

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.node,)


class Replace(ReversibleSitePass[Negation]):
    """``-x`` -> ``+x``, one at a time."""

    def match(self, index: GraphIndex) -> Iterator[Negation]:
        for node in index.nodes:
            if node.target is operator.neg:
                yield Negation(node)

    def rewrite(self, site: Negation, edit: Editor) -> None:
        edit.replace(site.node, edit.call_function(operator.pos, site.node.args[0], before=site.node, like=[site.node]))


class ReplaceInRounds(Replace):
    """Of the sites that are there, the first two at a time."""

    repeats = True

    def match(self, index: GraphIndex) -> Iterator[Negation]:
        yield from list(super().match(index))[:2]


class Calls(Transformation):
    """A pass that calls another one, by its method."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        return Replace().transform(graph_module)


class Decide(Instrument):
    """Lets sites through by their place, and writes down which ones it was asked for."""

    def __init__(self, *left_out: str) -> None:
        self.left_out = left_out
        self.asked: list[tuple[PassRun, str, tuple[str, ...]]] = []

    def should_rewrite(self, run: PassRun, graph_module: GraphModule, site: str, nodes: tuple[Node, ...]) -> bool:
        assert all(node.graph is graph_module.graph for node in nodes)
        self.asked.append((run, site, tuple(node.name for node in nodes)))
        return site not in self.left_out

    @property
    def sites(self) -> list[str]:
        return [site.removeprefix("site ") for _, site, _ in self.asked]


class WithoutTheMethod:
    """All that the protocol asks for."""

    def should_run(self, run: PassRun, graph_module: GraphModule) -> bool:
        return True

    def before_pass(self, run: PassRun, graph_module: GraphModule) -> None:
        pass

    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> None:
        pass

    def after_pass_failed(self, run: PassRun, graph_module: GraphModule, error: BaseException) -> None:
        pass


def targets(graph_module: GraphModule) -> str:
    signs = {operator.neg: "-", operator.pos: "+"}
    return "".join(signs[node.target] for node in iter_nodes(graph_module.graph) if node.target in signs)


def test_each_site_is_asked_for_in_order_with_its_run_and_nodes() -> None:
    decide = Decide()
    with instrumented(decide):
        compose(Replace(), Replace())(negated(3))
    assert decide.sites == ["neg", "neg_1", "neg_2"]
    assert [nodes for _, _, nodes in decide.asked] == [("neg",), ("neg_1",), ("neg_2",)]
    assert {(run.name, run.index) for run, _, _ in decide.asked} == {("replace", 0)}


def test_what_is_left_out_is_a_refusal_and_stays() -> None:
    graph_module = negated(3)
    with instrumented(Decide("site neg_1")):
        Replace()(graph_module, expect=2)
    (record,) = history(graph_module)
    (refusal,) = record.refusals
    assert (refusal.site, refusal.reason, refusal.nodes) == ("site neg_1", "instrument", ("neg_1",))
    assert refusal.message == "instrument Decide does not let `replace` rewrite `site neg_1`"
    assert "Run the pass without it" in REASONS["instrument"]
    assert targets(graph_module) == "+-+"
    assert graph_module(torch.ones(1)).item() == -1
    assert targets(undo(graph_module)) == "---"


def test_the_first_that_says_no_is_the_last_that_is_asked() -> None:
    outer, inner = Decide("site neg"), Decide("site neg_1")
    with instrumented(outer, WithoutTheMethod(), inner):
        graph_module = Replace()(negated(3))
    assert (outer.sites, inner.sites) == (["neg", "neg_1", "neg_2"], ["neg_1", "neg_2"])
    assert targets(graph_module) == "--+"


def test_in_rounds_no_site_is_asked_for_twice() -> None:
    decide = Decide("site neg_1")
    with instrumented(decide):
        graph_module = ReplaceInRounds()(negated(5))
    assert decide.sites == ["neg", "neg_1", "neg_2", "neg_3", "neg_4"]
    assert targets(graph_module) == "+-+++"
    assert [refusal.site for refusal in history(graph_module)[0].refusals] == ["site neg_1"]


def test_a_pass_that_is_called_by_its_method_says_who_it_is() -> None:
    decide = Decide()
    with instrumented(decide):
        Calls()(negated(1))
        Replace().transform(negated(1))
    inside, alone = (run for run, _, _ in decide.asked)
    assert (inside.name, inside.parent and inside.parent.name) == ("replace", "calls")
    assert (alone.name, alone.parent) == ("replace", None)
