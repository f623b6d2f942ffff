"""Counting steps and injecting faults, on which two of the properties stand."""

from __future__ import annotations

import pytest
import torch
from fault_injection import Moment, every, inject_faults, some
from footprints import Footprint
from house_properties import grown
from step_counts import count_steps
from torch import nn
from torch.fx import GraphModule, traceback as fx_traceback
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from fxopt_core import LintAndRecompile
from fxopt_testing import model_case


def test_steps_are_the_same_each_time_and_grow_with_the_work() -> None:
    def work(times: int) -> int:
        return count_steps(lambda: [each for n in range(times) for each in [n] if each == n])

    assert work(10) == work(10)
    assert (work(40) - work(20)) == 2 * (work(20) - work(10))


def test_a_walk_over_all_nodes_is_as_many_steps_as_there_are() -> None:
    graph = grown(model_case("blocks[modules]"), 20).graph_module.graph
    assert count_steps(lambda: len(list(graph.nodes))) - count_steps(lambda: 0) >= len(graph.nodes)


def test_no_fault_leaves_anything_behind_a_right_pass() -> None:
    def make() -> list[nn.Module]:
        captured = model_case("pair[modules]").capture()
        return [captured.graph_module, captured.model]

    moments: tuple[Moment, ...] = ("before", "after")
    for moment in moments:
        for choose in (some(20), lambda calls: calls[-10:]):
            given = (torch.ones(3, 4),)
            report = inject_faults(make, LintAndRecompile(), given, choose=choose, moment=moment)
            assert report.injected in (10, 20)
            assert not report.traces, report.traces


def test_what_a_fault_leaves_behind_is_told() -> None:
    def act(graph_module: GraphModule) -> None:
        vars(graph_module)["note"] = 1
        graph_module.recompile()
        del vars(graph_module)["note"]

    report = inject_faults(lambda: [model_case("pair[modules]").capture().graph_module], act, (torch.ones(3, 4),))
    assert any("note" in trace for trace in report.traces)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_contexts_of_torch_begin_and_end(moment: Moment) -> None:
    def act(graph_module: GraphModule) -> None:
        with ShapeEnv().suppress_guards(), fx_traceback.preserve_node_meta():
            graph_module.graph.lint()

    def make() -> list[nn.Module]:
        return [model_case("pair[modules]").capture().graph_module]

    report = inject_faults(make, act, (torch.ones(3, 4),), choose=every, moment=moment)
    assert report.injected > 50
    assert not report.traces, report.traces


def test_guards_that_stay_suppressed_are_told() -> None:
    environment = ShapeEnv()
    before = Footprint()
    with environment.suppress_guards():
        (line,) = before.differences(Footprint())
    assert line == "process, guards on sizes: True became False"


def test_a_footprint_tells_what_is_different() -> None:
    layer = nn.Linear(4, 2)
    model = nn.Sequential(layer, nn.BatchNorm1d(2))
    before = Footprint(model)
    assert not before.differences(Footprint(model))
    with torch.no_grad():
        layer.weight += 1
    after = Footprint(model)
    (line,) = before.differences(after)
    assert "weight" in line
    with torch.random.fork_rng(devices=[]):
        torch.rand(1)
        assert any(line.startswith("process, random numbers") for line in after.differences(Footprint(model)))
