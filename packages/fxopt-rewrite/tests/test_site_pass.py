from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from operator import neg, pos

import pytest
import torch
from site_passes import Neighbours, negated
from torch import Tensor, nn
from torch.fx import GraphModule, Node, symbolic_trace

from fxopt_core import (
    PassError,
    PostconditionError,
    PreconditionError,
    Refusal,
    UndoError,
    history,
    iter_nodes,
    undo,
)
from fxopt_rewrite import (
    Editor,
    GraphIndex,
    ReversibleSitePass,
    SitePass,
)


class FuseNegations(ReversibleSitePass[Neighbours]):
    """``-(-x)`` -> ``+x``, but not where the inner value is used elsewhere."""

    def match(self, index: GraphIndex) -> Iterator[Neighbours | Refusal]:
        for node in index.nodes:
            inner = node.args[0] if node.target is operator.neg else None
            if isinstance(inner, Node) and inner.target is operator.neg:
                yield Neighbours(inner, node)

    def check(self, site: Neighbours, index: GraphIndex) -> Refusal | None:
        if len(site.first.users) > 1:
            return index.refuse(site.label, "several-users", f"`{site.first.name}` is used elsewhere too", *site.nodes)
        return None

    def rewrite(self, site: Neighbours, edit: Editor) -> None:
        new = edit.call_function(operator.pos, site.first.args[0], before=site.second, like=[site.second, site.first])
        edit.replace(site.second, new)
        edit.erase(site.first)


class FuseAllNegations(FuseNegations):
    repeats = True

    def rewrite(self, site: Neighbours, edit: Editor) -> None:
        value = site.first.args[0]
        assert isinstance(value, Node)
        edit.replace(site.second, edit.current(value))
        edit.erase(site.first)


class Endless(SitePass[Neighbours]):
    repeats = True

    def match(self, index: GraphIndex) -> Iterator[Neighbours]:
        nodes = [node for node in index.nodes if node.op == "call_function"]
        yield Neighbours(nodes[0], nodes[0])

    def rewrite(self, site: Neighbours, edit: Editor) -> None:
        edit.replace(
            site.first, edit.call_function(operator.neg, *site.first.args, before=site.first, like=[site.first])
        )


def functions(graph_module: GraphModule) -> list[object]:
    return [node.target for node in iter_nodes(graph_module.graph) if node.op == "call_function"]


class TestRounds:
    def test_sites_are_rewritten_and_recorded(self) -> None:
        graph_module = FuseNegations()(negated(2), expect=1)
        assert FuseNegations.preserves_computation
        assert functions(graph_module) == [operator.pos]
        (rewrite,) = history(graph_module)[0].rewrites
        assert (rewrite.site, rewrite.before, rewrite.after) == ("neg + neg_1", ("neg_1", "neg"), ("pos",))
        assert graph_module(torch.ones(2)).tolist() == [1, 1]

    def test_overlapping_sites_are_refused(self) -> None:
        graph_module = FuseNegations()(negated(3))
        (record,) = history(graph_module)
        assert [(refusal.reason, refusal.nodes) for refusal in record.refusals] == [("overlapping", ("neg_1", "neg_2"))]
        assert len(record.rewrites) == 1
        with pytest.raises(PreconditionError, match=r"`neg_1 . neg_2` overlaps another site"):
            FuseNegations()(negated(3), strict=True)

    @pytest.mark.parametrize("times", range(6))
    def test_repeating_leaves_nothing_to_do(self, times: int) -> None:
        graph_module = FuseAllNegations()(negated(times), expect=times // 2)
        assert functions(graph_module) == [operator.neg] * (times % 2)
        assert history(graph_module)[0].refusals == ()

    def test_rounds_without_end_are_found(self) -> None:
        graph_module = negated(3)
        code = graph_module.code
        with pytest.raises(PostconditionError, match="pass `endless` finds new sites after every rewrite, without end"):
            Endless()(graph_module)
        assert graph_module.code == code

    def test_refusals(self) -> None:
        graph_module = symbolic_trace(shared)
        FuseNegations()(graph_module)
        (refusal,) = history(graph_module)[0].refusals
        assert (refusal.site, refusal.reason) == ("neg + neg_1", "several-users")
        assert not history(graph_module)[0].changed

    def test_near_misses_may_be_refusals_at_once(self) -> None:
        class Misses(FuseNegations):
            def match(self, index: GraphIndex) -> Iterator[Neighbours | Refusal]:
                yield Refusal("x", "hooks", "no")
                yield from super().match(index)

        graph_module = Misses()(negated(2), expect=1)
        assert [refusal.site for refusal in history(graph_module)[0].refusals] == ["x"]

    def test_checks_come_before_all_edits(self) -> None:
        seen: list[str] = []

        class Watches(FuseNegations):
            def check(self, site: Neighbours, index: GraphIndex) -> None:
                seen.append("check")

            def rewrite(self, site: Neighbours, edit: Editor) -> None:
                seen.append("rewrite")
                super().rewrite(site, edit)

        Watches()(symbolic_trace(lambda x, y: (neg(neg(x)), neg(neg(y)))))
        assert seen == ["check", "check", "rewrite", "rewrite"]


def shared(x: Tensor) -> Tensor:
    y = -x
    return -y + y


class TestSitePass:
    @pytest.mark.parametrize("cls", [FuseNegations, FuseAllNegations])
    def test_undo(self, cls: type[FuseNegations]) -> None:
        graph_module = negated(5)
        before = [(n.name, n.target, str(n.args), list(n.users)) for n in iter_nodes(graph_module.graph)]
        for back in (undo, lambda gm: cls()(gm, reverse=True)):
            cls()(graph_module)
            back(graph_module)
            after = [(n.name, n.target, str(n.args), [*n.users]) for n in iter_nodes(graph_module.graph)]
            assert str(after) == str(before)

    def test_options_without_a_signature(self) -> None:
        class Filtered(FuseNegations):
            def __init__(self, *, where: object = None) -> None:
                self.where = where

        graph_module = negated(2)
        code = graph_module.code
        Filtered(where=lambda name: True)(graph_module, expect=1)
        assert undo(graph_module).code == code
        with pytest.raises(PassError, match="option 'where'"):
            Filtered(where=lambda name: True)(graph_module, reverse=True)


class DropIdentities(ReversibleSitePass[Neighbours]):
    """``+x`` -> ``x``: what stands for a node is there already, and has users of its own."""

    def match(self, index: GraphIndex) -> Iterator[Neighbours]:
        return (Neighbours(node, node) for node in index.nodes if node.target is operator.pos)

    def rewrite(self, site: Neighbours, edit: Editor) -> None:
        value = site.first.args[0]
        assert isinstance(value, Node)
        edit.replace(site.first, edit.current(value))


def identities(x: Tensor) -> dict[str, object]:
    y = +x
    z = +y
    return {"a": y + x, "b": [torch.cat([x, y, x, z, y]), x * 2], "c": x[:, : (+x).shape[1]], "d": z}


def many_identities(x: Tensor) -> Tensor:
    return torch.cat([x, *(pos(x) if place % 2 else pos(pos(x)) for place in range(100)), x])


class TestReplacingByWhatIsThere:
    @pytest.mark.parametrize("function", [identities, many_identities])
    def test_undo_tells_the_readers_apart(self, function: Callable[[Tensor], object]) -> None:
        graph_module, x = symbolic_trace(function), torch.randn(2, 3)
        before = [(n.name, n.target, str(n.args), str(list(n.users))) for n in iter_nodes(graph_module.graph)]
        code, expected = graph_module.code, graph_module(x)
        for _ in range(2):
            DropIdentities()(graph_module)
            assert operator.pos not in functions(graph_module)
            assert str(graph_module(x)) == str(expected)
            undo(graph_module)
            after = [(n.name, n.target, str(n.args), str(list(n.users))) for n in iter_nodes(graph_module.graph)]
            assert after == before
            assert graph_module.code == code

    @pytest.mark.parametrize("function", [identities, many_identities])
    def test_a_reader_that_was_changed_since_is_a_refusal(self, function: Callable[[Tensor], object]) -> None:
        graph_module = DropIdentities()(symbolic_trace(function))
        x, *nodes = iter_nodes(graph_module.graph)
        cat = next(node for node in nodes if node.target is torch.cat)
        with graph_module.graph.inserting_after(x):
            other = graph_module.graph.call_function(operator.neg, (x,))
        cat.args = ([other] * 5,)
        with pytest.raises(UndoError, match="the arguments of node `cat`, which read `x`, were changed since"):
            undo(graph_module)
        assert cat.args == ([other] * 5,)

    def test_a_reader_that_is_gone_does_not_matter(self) -> None:
        graph_module = DropIdentities()(symbolic_trace(many_identities))
        x, *_, output = iter_nodes(graph_module.graph)
        output.args = (x,)
        graph_module.graph.eliminate_dead_code()
        undo(graph_module)
        assert functions(graph_module).count(operator.pos) == 150


class Parallel(nn.Module):
    """A hub, and a node that reads as many values."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.count = count

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([neg(neg(x)) for _ in range(self.count)])


def test_cost_is_linear(steps_of: Callable[[Callable[[], object]], int]) -> None:
    def steps(count: int) -> tuple[int, int]:
        graph_module = symbolic_trace(Parallel(count))
        forth = steps_of(lambda: FuseNegations()(graph_module))
        return forth, steps_of(lambda: undo(graph_module))

    steps(10)  # what is found out once is found out here
    for small, large in zip(steps(100), steps(400), strict=True):
        assert large < 4.2 * small
