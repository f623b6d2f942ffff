"""`bisect` finds the one rewrite that makes a check fail, in few checks, and says so where there is none."""

from __future__ import annotations

import itertools
import math
import operator
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from planted import AddToSub, DropTail, MulToDiv, steps
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import PreconditionError, Transformation, UnknownPassError, compose, iter_nodes
from fxopt_tools import bisect

X = torch.tensor([1.0, -2.0, 7.0])
TIMES = 14  # 14 sums and 28 products: 42 sites
SUMS = [f"add{f'_{place}' if place else ''}" for place in range(TIMES)]
PLACES = (0, 1, 6, TIMES - 1, TIMES, TIMES + 1, 20, 27, 3 * TIMES - 2, 3 * TIMES - 1)  # edges, and some between
PRODUCTS = [f"mul{f'_{place}' if place else ''}" for place in range(2 * TIMES)]


def holds(graph_module: GraphModule) -> bool:
    """Say whether a module computes what the model does, quickly."""
    expected = X
    for _ in range(TIMES):
        expected = (expected * 2 + 3) * 0.5
    return bool(torch.allclose(graph_module(X), expected))


class TestFinding:
    @pytest.mark.parametrize("place", PLACES)
    def test_a_wrong_rewrite_is_found_at_every_place(self, place: int) -> None:
        name = (SUMS + PRODUCTS)[place]
        graph_module = steps(TIMES)
        code = graph_module.code
        result = bisect(graph_module, compose(AddToSub(wrong_at=name), MulToDiv(wrong_at=name)), holds)
        assert (result.verdict, result.total) == ("found", 3 * TIMES)
        culprit = result.culprit
        assert culprit is not None
        assert (culprit.number, culprit.site, culprit.nodes) == (place + 1, f"at {name}", (name,))
        assert (culprit.pass_name, culprit.index) == (("add-to-sub", 0) if place < TIMES else ("mul-to-div", 1))
        (source,) = culprit.sources
        assert source.rpartition(":")[2] in (" x = x * 2.0 + 3.0", " x = x * 0.5")
        assert "planted.py" in source
        assert graph_module.code == code

    @settings(max_examples=settings().max_examples // 8, deadline=None)
    @given(total=st.integers(1, 70), data=st.data())
    def test_the_number_of_checks_is_at_most_log2_and_two(self, total: int, data: Any) -> None:
        place: int = data.draw(st.integers(0, total + 1))
        calls: list[int] = []

        def check(graph_module: GraphModule) -> bool:
            done = sum(node.target is operator.sub for node in iter_nodes(graph_module.graph))
            calls.append(done)
            return done < place

        result = bisect(sums(total), AddToSub(), check)
        assert len(calls) == len(result.trials) <= math.log2(total) + 2
        if place == 0:
            assert result.verdict == "fails-untransformed"
        elif place > total:
            assert result.verdict == "never-fails"
        else:
            assert result.culprit is not None
            assert result.culprit.number == place

    def test_inputs_are_verified(self) -> None:
        result = bisect(steps(3), compose(MulToDiv(wrong_at="mul_2"), AddToSub()), [X, X * 2])
        assert result.culprit is not None
        assert result.culprit.site == "at mul_2"
        assert "problem: `output` of input 1 differs" in str(result)  # the worse one of the two

    def test_tolerances_are_not_for_a_function(self) -> None:
        with pytest.raises(PreconditionError, match="let the function use tolerances of its own"):
            bisect(steps(TIMES), AddToSub(), holds, rtol=0.1)

    def test_a_module_is_traced(self) -> None:
        result = bisect(nn.Sequential(nn.ReLU()), DropTail(), torch.tensor([-1.0]))
        assert result
        assert result.total == 1


class TestErrorsOfPasses:
    @pytest.mark.parametrize("name", ["mul", "mul_7", "mul_9"])
    def test_an_error_at_a_site_counts_as_a_failed_check(self, name: str) -> None:
        result = bisect(steps(5), compose(AddToSub(), MulToDiv(raises_at=name)), lambda _: True)
        assert result.culprit is not None
        assert result.culprit.site == f"at {name}"
        assert f"cannot rewrite {name}" in str(result)

    @pytest.mark.parametrize("passes", [(AddToSub(), MulToDiv(raises_at="match")), (MulToDiv(raises_at="match"),)])
    def test_an_error_beside_all_sites_is_that_of_the_pass(self, passes: tuple[Transformation, ...]) -> None:
        result = bisect(steps(4), compose(*passes, DropTail(wrong=False)), lambda _: None)
        assert result.culprit is not None
        assert (result.culprit.pass_name, result.culprit.index) == ("mul-to-div", len(passes) - 1)
        assert (result.culprit.site, result.culprit.nodes) == (None, ())
        assert "cannot match" in str(result)


class TestNoCulprit:
    def test_a_check_that_never_fails(self) -> None:
        result = bisect(steps(4), compose(AddToSub(), MulToDiv()), X)
        assert (bool(result), result.verdict, result.culprit) == (False, "never-fails", None)
        assert "passes with all 12 rewrites" in str(result)

    def test_a_check_that_fails_without_any_rewrite(self) -> None:
        def check(graph_module: GraphModule) -> None:
            raise KeyError("typo")

        result = bisect(steps(4), compose(AddToSub(), MulToDiv()), check)
        assert result.verdict == "fails-untransformed"
        assert "fails before anything is rewritten: the check raised KeyError: 'typo'" in str(result)

    @pytest.mark.parametrize(("answer", "verdict"), [(True, "never-fails"), (0, "fails-untransformed")])
    def test_a_pipeline_that_rewrites_nothing(self, answer: object, verdict: str) -> None:
        result = bisect(symbolic_trace(nn.ReLU()), AddToSub(), lambda _: answer)
        assert (result.verdict, result.total) == (verdict, 0)
        assert len(result.trials) <= 2

    def test_a_pipeline_that_does_something_else_each_time(self) -> None:
        turns = itertools.count()

        class Moody(AddToSub):
            def match(self, index: Any) -> Any:
                sites = list(super().match(index))
                return sites[next(turns) % 2 :]

        with pytest.raises(PreconditionError, match="did not do the same 6 rewrites each time"):
            bisect(steps(6), Moody(), lambda _: False)


class TestArguments:
    def test_what_makes_no_sense_is_refused(self) -> None:
        wrong: Any = MulToDiv
        with pytest.raises(PreconditionError, match=r"pipeline is <class .*MulToDiv'>, expected an instance of"):
            bisect(steps(1), wrong, X)
        wrong = 3
        with pytest.raises(PreconditionError, match="the pipeline is 3, expected"):
            bisect(steps(1), wrong, X)
        with pytest.raises(PreconditionError, match="given an int as model"):
            bisect(wrong, AddToSub(), X)
        with pytest.raises(UnknownPassError):
            bisect(steps(1), "no-such-pass", X)
        with pytest.raises(PreconditionError, match=r"the model .* refuses input 0"):
            bisect(steps(1), AddToSub(), torch.ones(2, dtype=torch.int64).to_sparse())

    def test_a_model_that_cannot_be_traced_is_refused(self) -> None:
        class Branches(nn.Module):
            def forward(self, x: Tensor) -> Tensor:
                return x if x.sum() > 0 else -x

        with pytest.raises(PreconditionError, match=r"Branches that torch\.fx\.symbolic_trace cannot trace"):
            bisect(Branches(), AddToSub(), X)


def sums(number: int) -> GraphModule:
    """Return a graph of so many sums."""

    class Sums(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(number):
                x = x + 1.0
            return x

    return symbolic_trace(Sums())
