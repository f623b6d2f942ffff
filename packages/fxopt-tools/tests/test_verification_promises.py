"""Passes that approximate are held to the signal-to-noise ratio that they promise."""

from __future__ import annotations

import copy
import math
import pickle
from typing import ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import LintAndRecompile, PreconditionError, Transformation, compose, instrumented, iter_nodes
from fxopt_tools import Verify, verify
from fxopt_tools.verification.closeness import cosine

X = torch.randn(16, 32, generator=torch.Generator().manual_seed(0))


class Noisy(Transformation):
    """``y`` -> ``y (1 + share * sign)``: noise of a known share."""

    promised_sqnr: ClassVar[float | None] = 40.0

    def __init__(self, share: float = 0.005) -> None:
        self.share = share

    def transform(self, graph_module: GraphModule) -> GraphModule:
        output = next(node for node in iter_nodes(graph_module.graph) if node.op == "output")
        signs = torch.sign(torch.randn(32, generator=torch.Generator().manual_seed(1)))
        name = f"noise_{len(list(graph_module.buffers()))}"
        graph_module.register_buffer(name, 1 + self.share * signs)
        with graph_module.graph.inserting_before(output):
            noise = graph_module.graph.get_attr(name)
            noisy = graph_module.graph.call_function(torch.mul, (output.args[0], noise))
        output.args = (noisy,)
        return graph_module


class AlsoNoisy(Noisy):
    """Another one."""


class Exact(Noisy):
    """The same, without a promise."""

    promised_sqnr = None


def model() -> GraphModule:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return symbolic_trace(nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32)).eval())


def test_a_result_within_the_promise_passes_with_its_ratio_and_cosine() -> None:
    original = model()
    report = verify(original, Noisy()(copy.deepcopy(original)), X)
    (output,) = report.outputs
    assert report and output.sqnr_db == pytest.approx(46, abs=0.1) and output.least_sqnr_db == pytest.approx(40)
    assert output.cosine is not None and 0.9999 < output.cosine < 1 and output.tolerance is None
    assert "SQNR 40 dB promised by noisy" in str(report) and "cosine" in str(report)


def test_an_approximated_original_is_named() -> None:
    original = model()
    report = verify(Noisy()(copy.deepcopy(original)), original, X)
    assert report and "the original is approximated itself, with the noise promised by noisy" in str(report.notes)


def test_what_is_computed_for_padding_is_not_held_to_a_promise() -> None:
    class Masked(nn.Module):
        def __init__(self, off: float) -> None:
            super().__init__()
            self.off = off

        def forward(self, x: Tensor, attention_mask: Tensor) -> Tensor:
            return x + self.off * (1 - attention_mask[..., None])

    inputs = {"x": torch.randn(2, 3, 4), "attention_mask": torch.tensor([[1, 1, 1], [1, 0, 0]])}
    report = verify(Masked(0.0), Masked(9.0), inputs, sqnr=40)
    assert report and "not compared: what is computed for the padding of `attention_mask`" in str(report.notes)
    assert not verify(Masked(0.0), Masked(9.0), inputs)


def test_a_result_beyond_the_promise_fails_and_says_by_how_much() -> None:
    original = model()
    report = verify(original, Noisy(0.02)(copy.deepcopy(original)), X)
    assert not report and "cosine similarity 0.999" in str(report)
    assert "ratio of 34.0 dB, expected 40.0 dB promised by noisy" in str(report.worst)


def test_noises_of_several_passes_add_up_and_a_pass_counts_once() -> None:
    original = model()
    both = compose(Noisy(), AlsoNoisy())(copy.deepcopy(original))
    assert verify(original, both, X).outputs[0].least_sqnr_db == pytest.approx(40 - 10 * math.log10(2))
    assert verify(original, both, X).outputs[0].tolerance_source == "promised by also-noisy and noisy"
    twice = compose(Noisy(), Noisy(0.001))(copy.deepcopy(original))
    assert verify(original, twice, X).outputs[0].least_sqnr_db == pytest.approx(40)


def test_what_both_have_is_no_excuse() -> None:
    original = Noisy()(model())
    report = verify(original, Exact()(copy.deepcopy(original)), X)
    assert not report and report.outputs[0].least_sqnr_db is None
    assert verify(Noisy()(copy.deepcopy(original)), original, X).outputs[0].least_sqnr_db is not None


def test_the_promise_travels_with_the_ledger_and_inside_of_other_modules() -> None:
    original = model()
    loaded = pickle.loads(pickle.dumps(Noisy()(copy.deepcopy(original))))
    assert verify(original, loaded, X) and verify(nn.Sequential(original), nn.Sequential(loaded), X)


def test_a_bound_of_ones_own_replaces_promises_and_tolerances() -> None:
    original = model()
    noisy, exact = Noisy()(copy.deepcopy(original)), Exact()(copy.deepcopy(original))
    assert not verify(original, noisy, X, sqnr=50) and verify(original, exact, X, sqnr=45)
    assert verify(original, exact, X, sqnr=45).outputs[0].tolerance_source == "as stated"
    assert not verify(original, noisy, X, rtol=1e-3, atol=0.0)
    with pytest.raises(PreconditionError, match=r"sqnr=40 is given together with rtol=0.1"):
        verify(original, noisy, X, sqnr=40, rtol=0.1)
    for wrong in (-1.0, math.nan, math.inf, True):
        with pytest.raises(PreconditionError, match=r"sqnr is .*, expected a finite number"):
            verify(original, noisy, X, sqnr=wrong)


def test_other_values_have_to_be_equal_under_a_promise() -> None:
    class Returns(nn.Module):
        def __init__(self, count: int, scale: float, bad: float = 0.0) -> None:
            super().__init__()
            self.count, self.scale, self.bad = count, scale, bad

        def forward(self, x: Tensor) -> object:
            y = x * self.scale
            y[0, 0] += self.bad
            return y, torch.tensor(self.count), self.scale

    assert verify(Returns(1, 1.0), Returns(1, 1.001), X, sqnr=50)
    assert not verify(Returns(1, 1.0), Returns(2, 1.0), X, sqnr=50)
    assert [o.path for o in verify(Returns(1, 1.0), Returns(1, 1.1), X, sqnr=50).failures] == ["output[0]", "output[2]"]
    for bad in (math.nan, math.inf):
        report = verify(Returns(1, 1.0), Returns(1, 1.0, bad), X, sqnr=0)
        assert not report and report.worst is report.outputs[0] and "-inf dB" in str(report)


def test_the_gate_holds_each_pass_to_its_promise_and_the_next_to_none() -> None:
    gate = Verify(X, on_failure="veto")
    with instrumented(gate):
        compose(Noisy(), Exact(1e-3), LintAndRecompile(), AlsoNoisy(0.05))(model())
    assert [check.passed for check in gate.checks] == [True, False, True, False]


def test_cosine_is_that_of_the_worst_sample() -> None:
    a = torch.eye(3)
    b = a.clone()
    b[1] = torch.tensor([1.0, 1.0, 0.0])
    assert cosine(a, a) == 1 and cosine(a, b) == pytest.approx(math.sqrt(0.5)) and cosine(a, -a) == -1
    assert cosine(torch.zeros(2), torch.zeros(2)) == 1 and cosine(torch.zeros(2), torch.ones(2)) == 0
    huge, tiny = a[0].double() * 1e300, a[0].double() * 1e-300
    assert cosine(huge, tiny) == 1 and cosine(torch.tensor(2.0), torch.tensor(3.0)) == 1
