"""MergeLinears with only_if_faster: what is measured, what is refused for it, and that both are recorded."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_core import PassOptionError, PreconditionError, history, parse_pipeline, registry, undo
from fxopt_linear import MergeLinears
from fxopt_rewrite.shapes.infer import infer_shapes
from fxopt_rewrite.speed import Ratio, Speedup, comparing_with
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import graph_of

FASTER, SLOWER = Speedup(Ratio(1.25, 1.2, 1.3), 0.02), Speedup(Ratio(0.8, 0.7, 0.9), 0.02)
SAME = Speedup(Ratio(1.01, 0.99, 1.02), 0.02)
GATED = MergeLinears(only_if_faster=True)


class Measured:
    """Stands in for the measurement: runs both ways once, notes what they gave, and answers as it is told."""

    def __init__(self, *answers: Speedup) -> None:
        self.answers = answers
        self.results: list[tuple[Any, Any]] = []
        self.devices: list[torch.device] = []

    def __call__(self, former: Callable[[], Any], new: Callable[[], Any], device: torch.device) -> Speedup:
        self.results.append((former(), new()))
        self.devices.append(device)
        return self.answers[(len(self.results) - 1) % len(self.answers)]


class Two(nn.Module):
    """Two groups of other sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 6), nn.Linear(4, 2, bias=False)
        self.up, self.gate = nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.cat([self.q(x), self.k(x)], -1).relu()
        z: Tensor = self.up(y) * self.gate(y)
        return z


def gated(
    model: nn.Module, measured: Measured, form: Form = "modules", x: Tensor | None = None, **options: Any
) -> GraphModule:
    graph_module = graph_of(model.eval(), form, torch.randn(5, 4) if x is None else x)
    with comparing_with(measured):
        return MergeLinears(only_if_faster=True, **options)(graph_module)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def test_each_group_is_decided_on_its_own_and_recorded() -> None:
    model, x = Two().eval(), torch.randn(5, 4)
    graph_module = gated(model, Measured(FASTER, SLOWER), "modules", x)
    (record,) = history(graph_module)
    (rewrite,), (refusal,) = record.rewrites, record.refusals
    assert rewrite.site == "q + k"
    place = "at (5, 4) to 6 + 2, float32 on cpu, 1 thread"
    assert rewrite.note == f"speed-up 1.250 (1.200 to 1.300), noise 2.0% {place}"
    assert (refusal.site, refusal.reason) == ("up + gate", "no-measured-benefit")
    ratio = "speed-up 0.800 (0.700 to 0.900), noise 2.0%"
    assert refusal.message == f"merging `up + gate` is slower ({ratio}) at (5, 8) to 3 + 3, float32 on cpu, 1 thread"
    assert rewrite.note in str(history(graph_module)) and rewrite.note in history(graph_module).to_json()
    torch.testing.assert_close(graph_module(x), model(x))


def test_no_benefit_beyond_noise_is_refused_and_strict_fails() -> None:
    graph_module = gated(Two(), Measured(SAME))
    assert [refusal.reason for refusal in history(graph_module)[-1].refusals] == ["no-measured-benefit"] * 2
    assert "is no faster beyond noise" in history(graph_module)[-1].refusals[0].message
    with comparing_with(Measured(SAME)), pytest.raises(PreconditionError, match="no-measured-benefit"):
        GATED(graph_of(Two().eval(), "modules", torch.randn(5, 4)), strict=True)


def test_both_ways_compute_the_same_in_the_shapes_of_the_site() -> None:
    x = torch.randn(2, 7, 4, dtype=torch.float64)
    measured = Measured(FASTER)
    gated(Two().double(), measured, "modules", x)
    (apart, merged), (second, _) = measured.results
    assert [tuple(value.shape) for value in apart] == [(2, 7, 6), (2, 7, 2)]
    assert [tuple(value.shape) for value in second] == [(2, 7, 3), (2, 7, 3)]
    for one, other in zip(apart, merged, strict=True):
        torch.testing.assert_close(one, other)
    assert apart[0].dtype == torch.float64
    assert measured.devices == [torch.device("cpu")] * 2


def test_transposed_weights_and_copied_results() -> None:
    class Transposed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(4, 2))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return x @ self.a, (x @ self.b).relu()

    measured = Measured(FASTER)
    gated(Transposed(), measured, "functions", torch.randn(3, 4))
    ((apart, merged),) = measured.results
    for one, other in zip(apart, merged, strict=True):
        torch.testing.assert_close(one, other)
    assert merged[0].is_contiguous() and not merged[1].is_contiguous()  # the first one is returned


def test_layers_called_on_several_inputs_are_measured_on_all() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k = nn.Linear(4, 6), nn.Linear(4, 2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            found: Tensor = self.q(x).sum() + self.k(x).relu().sum() + self.q(y).sum() + self.k(y).relu().sum()
            return found

    measured = Measured(FASTER)
    graph_module = graph_of(Twice().eval(), "modules", torch.randn(3, 4), torch.randn(5, 4))
    with comparing_with(measured):
        GATED(graph_module, expect=1)
    ((apart, merged),) = measured.results
    assert [tuple(value.shape) for value in apart] == [(3, 6), (3, 2), (5, 6), (5, 2)]
    assert len(merged) == 4
    assert "at (3, 4) and (5, 4) to 6 + 2" in history(graph_module)[-1].rewrites[0].note


def test_the_same_regime_is_measured_once() -> None:
    class Three(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Two() for _ in range(3)])

        def forward(self, x: Tensor) -> list[Tensor]:
            return [block(x + place) for place, block in enumerate(self.blocks)]

    measured = Measured(FASTER, SLOWER)
    graph_module = gated(Three(), measured)
    assert len(measured.results) == 2
    assert [len(history(graph_module)[-1].rewrites), len(history(graph_module)[-1].refusals)] == [3, 3]


def test_symbolic_sizes_are_those_of_the_example() -> None:
    measured = Measured(FASTER)
    graph_module = gated(Two(), measured, "export-dynamic", torch.randn(7, 4))
    assert [tuple(apart[0].shape) for apart, _ in measured.results] == [(7, 6), (7, 3)]
    torch.testing.assert_close(graph_module(torch.randn(2, 4)).shape, torch.Size([2, 3]))


def test_unknown_shapes_are_refused() -> None:
    measured = Measured(FASTER)
    graph_module = torch.fx.symbolic_trace(Two().eval())
    with comparing_with(measured):
        GATED(graph_module, expect=0)
    assert {refusal.reason for refusal in history(graph_module)[-1].refusals} == {"shape-unknown"}
    assert "`x`" in history(graph_module)[-1].refusals[0].message
    assert not measured.results
    with comparing_with(measured):
        GATED(infer_shapes(graph_module, torch.randn(5, 4)), expect=2)


def test_a_second_run_repeats_its_refusals_without_measuring() -> None:
    graph_module = gated(Two(), Measured(FASTER, SLOWER))
    before = [str(node) for node in graph_module.graph.nodes]
    again = Measured(FASTER)
    with comparing_with(again):
        MergeLinears(only_if_faster=True)(graph_module, expect=0)
    assert not again.results
    first, second = history(graph_module)
    assert second.refusals == first.refusals
    assert [str(node) for node in graph_module.graph.nodes] == before
    torch.set_num_threads(2)  # another regime
    with comparing_with(again):
        MergeLinears(only_if_faster=True)(graph_module, expect=1)
    assert len(again.results) == 1


def test_without_the_option_nothing_is_measured() -> None:
    measured = Measured(SLOWER)
    with comparing_with(measured):
        MergeLinears()(graph_of(Two().eval(), "modules", torch.randn(5, 4)), expect=2)
    assert not measured.results


def test_undo_in_another_object_and_after_a_pickle() -> None:
    model = Two().eval()
    state = copy.deepcopy(model.state_dict())
    graph_module = pickle.loads(pickle.dumps(gated(model, Measured(FASTER, SLOWER))))
    assert "speed-up 1.250" in history(graph_module)[-1].rewrites[0].note
    with comparing_with(Measured(SLOWER)):
        MergeLinears(only_if_faster=True)(graph_module, reverse=True)
    assert list(graph_module.state_dict()) == list(state)
    assert all(torch.equal(value, state[key]) for key, value in graph_module.state_dict().items())
    other = gated(model, Measured(FASTER))
    undo(other)
    assert list(other.state_dict()) == list(state)


def test_the_signature_and_the_text_of_a_pipeline_carry_it() -> None:
    assert GATED.signature != MergeLinears().signature
    assert MergeLinears(only_if_faster=True) == GATED
    text = "merge-linears{only-if-faster=True}"
    assert registry().pipeline(text) == GATED
    assert registry().pipeline_text(GATED) == text
    assert parse_pipeline(text)
    with pytest.raises(PassOptionError):
        registry().pipeline("merge-linears{only-if-faster=3}")


def test_weights_on_meta_are_measured_where_the_graph_is_for() -> None:
    graph_module = graph_of(Two().eval(), "export", torch.randn(5, 4))
    for module in graph_module.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = nn.Parameter(torch.empty_like(parameter, device="meta"))
    measured = Measured(FASTER)
    with comparing_with(measured):
        GATED(graph_module, expect=2)
    assert measured.devices == [torch.device("cpu")] * 2
    assert all(parameter.is_meta for parameter in graph_module.parameters())


def test_it_runs_with_the_real_measurement() -> None:
    graph_module = graph_of(Two().eval(), "modules", torch.randn(5, 4))
    GATED(graph_module)
    (record,) = history(graph_module)
    assert len(record.rewrites) + len(record.refusals) == 2
    texts = [*(each.note for each in record.rewrites), *(each.message for each in record.refusals)]
    assert all("speed-up" in text or "no ratio" in text for text in texts)  # none on a busy machine
