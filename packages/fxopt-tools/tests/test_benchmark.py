"""`bench` and `compare_pipelines` by a clock that is set by hand: each layer has its cost."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
from site_passes import Call
from torch import Tensor, nn
from torch.fx import GraphModule, Tracer

from fxopt_core import PassError, PreconditionError, Transformation, compose, history, iter_nodes
from fxopt_rewrite import Editor, GraphIndex, SitePass
from fxopt_tools import Benchmark, bench, compare_pipelines
from fxopt_tools.bench import Sampler
from fxopt_tools.speed import interval

X = torch.ones(2)


class Clock:
    """A clock that goes on as modules run, up to some noise."""

    def __init__(self) -> None:
        self.now, self.noise, self.random = 0.0, 0.0, random.Random(0)

    def __call__(self) -> float:
        return self.now

    def spend(self, seconds: float) -> None:
        self.now += seconds * (1 + self.random.uniform(-self.noise, self.noise))


CLOCK = Clock()


@pytest.fixture(autouse=True)
def _clock_is_reset() -> None:
    CLOCK.__init__()  # type: ignore[misc]  # copies of modules refer to this one


class Work(nn.Module):
    """Takes a second times its cost."""

    def __init__(self, cost: float) -> None:
        super().__init__()
        self.cost = cost

    def forward(self, x: Tensor) -> Tensor:
        CLOCK.spend(self.cost)
        return x


class WholeTracer(Tracer):
    """Goes into no module."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True


def model(**costs: float) -> GraphModule:
    """Return a graph of works, by name."""
    layers = nn.Sequential()
    for name, cost in costs.items():
        layers.add_module(name, Work(cost))
    return GraphModule(layers, WholeTracer().trace(layers))


class Scale(SitePass[Call]):
    """``work(x)`` -> ``scaled_work(x)``, for works of names that begin with a prefix."""

    factor: ClassVar[float] = 1.0
    needs: ClassVar[str] = ""

    def __init__(self, prefix: str = "") -> None:
        self.prefix = prefix

    def match(self, index: GraphIndex) -> Iterator[Call]:
        if self.needs and not any(self.needs in str(node.target) for node in index.nodes):
            raise ValueError(f"there is no {self.needs}")
        for node in index.nodes:
            if node.op == "call_module" and str(node.target).startswith(self.prefix):
                yield Call(node)

    def rewrite(self, site: Call, edit: Editor) -> None:
        old: Any = edit.index.module_of(site.node)
        full = str(site.node.target)
        name = edit.add_module(full, f"{full}_{type(self).__name__.lower()}", Work(old.cost * self.factor))
        edit.replace(site.node, edit.call_module(name, *site.node.args, before=site.node, like=[site.node]))
        edit.drop_module(full, {})


class Halve(Scale):
    factor = 0.5


class Keep(Scale):
    """Rewrites, and changes nothing about costs."""


class Double(Scale):
    factor = 2.0


class NeedsKept(Halve):
    needs = "_keep"


class Whole(Transformation):
    """No site pass: every work costs a half."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in iter_nodes(graph_module.graph):
            if node.op == "call_module":
                old: Any = graph_module.get_submodule(str(node.target))
                graph_module.add_module(f"{node.target}_whole", Work(old.cost / 2))
                node.target = f"{node.target}_whole"
        return graph_module


def measured(graph_module: GraphModule, pipeline: Transformation, **kwargs: Any) -> Benchmark:
    return bench(graph_module, pipeline, X, clock=CLOCK, rounds=10, **kwargs)


class TestBench:
    def test_the_whole(self) -> None:
        graph_module = model(a=1.0, b=3.0)
        result = measured(graph_module, Halve("b"))
        assert (result.original.median, result.transformed.median) == (4.0, 2.5)
        assert result.original.spread == pytest.approx(0)
        assert result.speedup.median == pytest.approx(1.6)
        assert (result.verdict, result.contributions) == ("faster", ())
        assert result.noise == pytest.approx(0)
        assert not history(graph_module)
        assert str(result).splitlines()[2].startswith("speed-up: 1.600 (1.600 to 1.600), faster; two copies")

    def test_each_pass(self) -> None:
        result = measured(model(a=1.0, b=3.0, c=1.0), compose(Halve("b"), Keep("a"), Double("c")), per="pass")
        assert [each.part.name for each in result.contributions] == ["halve", "keep", "double"]
        assert [each.effect.median for each in result.contributions] == pytest.approx([6 / 4.5, 1, 3.5 / 4.5])
        verdicts = [each.effect.against(result.noise) for each in result.contributions]
        assert verdicts == ["faster", "within noise", "slower"]
        table = str(result).splitlines()[4:]
        assert table[0].startswith("left out  time without  interval ")
        assert [line.split()[0] for line in table[1:]] == ["halve", "keep", "double"]

    def test_each_site(self) -> None:
        result = measured(model(a=1.0, b=3.0), compose(Halve(), Whole()), per="site")
        assert [each.part.name for each in result.contributions] == ["halve on a", "halve on b", "whole"]
        assert [each.effect.median for each in result.contributions] == pytest.approx([1.25, 1.75, 2])

    def test_noise_is_measured_and_counts(self) -> None:
        CLOCK.noise = 0.2
        result = measured(model(a=1.0), Keep())
        assert 0.02 < result.noise < 0.5
        assert result.verdict == "within noise"
        assert measured(model(a=1.0), Halve()).verdict == "faster"
        assert result.original.spread > 0.01

    def test_several_inputs_are_one_call(self) -> None:
        result = bench(model(a=1.0), Halve(), [X, {"input": X}], clock=CLOCK, rounds=8)
        assert result.original.median == 2.0

    def test_a_busy_machine_gives_no_ratio(self) -> None:
        """The extremes are of other load; the text has no ratio, and says why."""
        CLOCK.noise = 0.9
        result = measured(model(a=1.0), Halve())
        assert result.doubt is not None and "spread by" in result.doubt
        assert result.verdict == "within noise"
        assert f"no ratio: {result.doubt}; measure again" in str(result) and "speed-up" not in str(result)

    @pytest.mark.parametrize("rounds", [7, 8.0, True])
    def test_too_few_rounds_are_refused(self, rounds: Any) -> None:
        with pytest.raises(PreconditionError, match="expected a number from 8"):
            bench(model(a=1.0), Halve(), X, rounds=rounds)

    def test_what_makes_no_sense_is_refused(self) -> None:
        with pytest.raises(PreconditionError, match="expected 'pipeline', 'pass' or 'site'"):
            measured(model(a=1.0), Halve(), per="layer")
        with pytest.raises(PreconditionError, match="the model refuses the inputs: TypeError"):
            bench(model(a=1.0), Halve(), (X, X), clock=CLOCK)
        with pytest.raises(PassError, match="there is no _keep"):
            measured(model(a=1.0), NeedsKept())


class TestSampling:
    @pytest.mark.parametrize(("number", "ends"), [(8, (0, 7)), (10, (0, 9)), (30, (7, 22))])
    def test_ends_of_intervals_are_those_of_order_statistics(self, number: int, ends: tuple[int, int]) -> None:
        assert list(interval(range(number))) == list(ends)
        outside = sum(math.comb(number, each) for each in range(ends[0] + 1)) / 2**number
        assert 2 * outside <= 0.01

    def test_a_model_that_writes_its_input_gets_a_new_one_each_time(self) -> None:
        class Writes(nn.Module):
            def forward(self, x: list[float]) -> None:
                x.append(1.0)
                CLOCK.spend(len(x))

        given: list[float] = []
        (times,) = Sampler((given,), rounds=8, clock=CLOCK, sample_seconds=100.0).measure(Writes())
        assert times.seconds == (1.0,) * 8
        assert given == []


class Wrong(Transformation):
    """Adds one to the output."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        output = graph_module.graph.output_node()
        with graph_module.graph.inserting_before(output):
            output.args = (graph_module.graph.call_function(torch.add, (output.args[0], 1.0)),)
        return graph_module


def test_pipelines_are_compared_and_the_fastest_one_is_named() -> None:
    given = model(a=2.0, b=2.0)
    quarter = compose(Halve(), Halve())
    ways = {"half": Halve(), "kept": Keep(), "wrong": Wrong(), "none": NeedsKept(), "quarter": quarter}
    found = compare_pipelines(given, ways, X, rounds=8, clock=CLOCK)
    speeds = [None if each.speedup is None else round(each.speedup.median, 3) for each in found.candidates]
    assert speeds == [2.0, 1.0, None, None, 4.0]
    assert [each.problem is None for each in found.candidates] == [True, True, False, False, True]
    assert found.best is found.candidates[-1]
    lines = str(found).splitlines()
    assert any("differs" in line for line in lines if line.startswith("wrong"))
    assert "quarter" in lines[-1]
    assert not history(given)


class Rough(Halve):
    preserves_computation = False


def test_what_approximates_is_measured_and_not_advised() -> None:
    found = compare_pipelines(model(a=1.0), {"kept": Keep(), "rough": Rough()}, X, rounds=8, clock=CLOCK)
    assert found.candidates[1].speedup is not None and found.candidates[1].speedup.median == 2.0
    assert str(found).splitlines()[-1] == "leave the model as it is: no exact pipeline makes it faster"
