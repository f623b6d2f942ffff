"""The comparison with peers judges rightly: what is wrong, raises or breaks a promise is counted as that."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from benchmarks.cases import FAMILIES, Case
from benchmarks.contenders import FXOPT, FXOPT_CAPTURED, OPTIMUM, Contender, dynamic_shapes
from benchmarks.correctness import all_cases, by_family, by_topic, counted, error_of, judge, one_of_each, short
from torch import Tensor, nn

from benchmarks import promises

CASES = all_cases()
FIRST = one_of_each((case.family, case) for case in CASES)


def titled(case: Case) -> str:
    """What a case is called in the output of tests."""
    return case.title


def twice(model: nn.Module, case: Case) -> Any:
    """A contender that is wrong."""
    return lambda *inputs: 2 * model(*inputs)


def raising(model: nn.Module, case: Case) -> Any:
    """A contender that raises."""
    raise NotImplementedError


def alone(model: nn.Module, case: Case) -> Any:
    """A contender that does nothing."""
    return torch.fx.symbolic_trace(model)


def compiling(model: nn.Module, case: Case) -> Any:
    """A contender whose result nobody can look into."""
    return lambda *inputs: model(*inputs)


def test_titles_are_unique_and_every_family_has_many_cases() -> None:
    assert len({case.title for case in CASES}) == len(CASES) >= 200
    assert all(sum(case.family == family for case in CASES) >= 30 for family in FAMILIES)


@pytest.mark.parametrize("case", FIRST, ids=titled)
def test_models_and_inputs_are_the_same_each_time(case: Case) -> None:
    one, other = case.build().state_dict(), case.build().state_dict()
    assert all(torch.equal(one[key], other[key]) for key in one)
    for first, second in zip(case.inputs(), case.inputs(), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize("case", FIRST, ids=titled)
def test_verdicts(case: Case) -> None:
    assert judge(Contender("wrong", twice), case).kind == "wrong"
    assert judge(Contender("raises", raising), case).detail == "NotImplementedError"
    assert judge(Contender("idle", alone), case).kind == "left alone"
    assert judge(Contender("compiles", compiling), case).kind == "compiled"


@pytest.mark.parametrize("case", CASES, ids=titled)
def test_fxopt_computes_every_case_right(case: Case) -> None:
    """By rewriting the trace, or by leaving it alone."""
    assert judge(FXOPT, case).right


@pytest.mark.parametrize("case", FIRST, ids=titled)
def test_fxopt_keeps_promises(case: Case) -> None:
    for promise in promises.PROMISES.values():
        assert promises.kept_in(promise, FXOPT, case) in (True, None)


@pytest.mark.parametrize("case", FIRST, ids=titled)
def test_fxopt_computes_a_capture_right(case: Case) -> None:
    assert judge(FXOPT_CAPTURED, case).kind == "rewritten"


def test_axes_that_vary_are_dynamic() -> None:
    case = next(case for case in CASES if case.family == "batch norm into convolution")
    assert [sorted(axes) for axes in dynamic_shapes(case)] == [[0, 2, 3]]


@pytest.mark.parametrize(
    ("expected", "found", "error"),
    [
        ([1.0, 2.0], [1.0, 2.0], 0.0),
        ([math.nan, math.inf], [math.nan, math.inf], 0.0),
        ([math.nan, 1.0], [0.0, 1.0], math.inf),
        ([math.inf, 1.0], [-math.inf, 1.0], math.inf),
        ([0.0, 0.0], [0.0, 1e-9], math.inf),
        ([2.0, 0.0], [2.0, 2e-4], 1.0),
    ],
    ids=str,
)
def test_errors_are_relative_to_the_largest_element(expected: list[float], found: list[float], error: float) -> None:
    assert error_of(torch.tensor(expected), torch.tensor(found)) == pytest.approx(error, rel=1e-4)


def test_integers_have_to_be_equal() -> None:
    assert error_of(torch.tensor([5]), torch.tensor([5])) == 0
    assert error_of(torch.tensor([5_000_000]), torch.tensor([5_000_001])) == math.inf


def test_another_dtype_or_shape_is_wrong() -> None:
    def widened(model: nn.Module, case: Case) -> Any:
        return lambda *inputs: model(*inputs).double()

    def flattened(model: nn.Module, case: Case) -> Any:
        return lambda *inputs: model(*inputs).flatten()

    for contender in (widened, flattened):
        assert judge(Contender("other", contender), FIRST[0]).kind == "wrong"


def test_tables_count_what_was_found_and_name_who_is_absent() -> None:
    case = FIRST[0]
    verdicts = {name: {case: judge(Contender(name, rewrite), case)} for name, rewrite in (("w", twice), ("r", raising))}
    compiled = {case: judge(Contender("compiles", compiling), case)}
    assert counted(compiled, [case]) == "1 of 1"
    assert counted(verdicts["w"], [case]) == "0 of 1 (0 rewritten, 1 wrong)"
    assert counted(verdicts["r"], [case]) == "0 of 1 (0 rewritten, 1 raise)"
    assert counted({}, [case]) == "-"
    assert short(verdicts["r"], [case]) == "0 of 1 (NotImplementedError)"
    assert [row.label for row in by_topic([case], verdicts, {}).rows] == [f"{case.family}: {case.topic}"]
    assert [row.cells[0] for row in by_family([case], verdicts, {}).rows] == [1, 1]


def merged_in_place(model: nn.Module, case: Case) -> Any:
    """A contender that writes into the caller's weights."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2)
    return torch.fx.symbolic_trace(Within(model))


class Within(nn.Module):
    """The model by another name."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Any:
        """The model."""
        return self.model(x)


def test_broken_promises_are_counted() -> None:
    case = next(case for case in CASES if case.family == "merged linears")
    writes = Contender("writes", merged_in_place)
    assert promises.caller_untouched(writes, case) is False
    assert promises.counted(promises.caller_untouched, writes, [case]) == "0 of 1"

    def never(graph_module: torch.fx.GraphModule, case: Case) -> torch.fx.GraphModule:
        return graph_module

    assert promises.undone(replace(FXOPT, undo=never), case) is False
    assert promises.undone(FXOPT, case) is True


def test_undo_may_give_back_an_equal_constant_of_another_type() -> None:
    class By(nn.Module):
        def __init__(self, constant: float) -> None:
            super().__init__()
            self.constant = constant

        def forward(self, x: Tensor) -> Tensor:
            return x / self.constant

    nodes = [promises.nodes_of(torch.fx.symbolic_trace(By(constant))) for constant in (2, 2.0, 3, math.nan, math.nan)]
    assert nodes[0] == nodes[1] != nodes[2]
    assert nodes[3] == nodes[4]


def test_optimum_takes_part_where_it_is_installed() -> None:
    pytest.importorskip("optimum")
    nested = next(case for case in CASES if "all have a bias" in case.title and "nested" in case.title)
    root = next(case for case in CASES if "all have a bias" in case.title and "root" in case.title)
    assert judge(OPTIMUM, nested).kind == "rewritten"
    assert judge(OPTIMUM, root).kind == "raises"
