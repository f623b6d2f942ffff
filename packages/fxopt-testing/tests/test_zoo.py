"""The zoo: what it holds, that it can be captured, and that its cases are always the same."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxopt_testing import ModelCase, model_case, zoo
from fxopt_testing.forms import Form
from fxopt_testing.outcomes import behaviour_of
from fxopt_testing.pictures import bits_of, picture
from fxopt_tools import differing
from fxopt_tools.verification.isolated_run import run_once


def test_it_holds_every_kind_of_model() -> None:
    cases = zoo()
    assert len({case.id for case in cases}) == len(cases) >= 107
    assert {case.form for case in cases} >= {"modules", "functions", "export", "export-dynamic", "graph"}
    assert {case.dtype for case in cases} == {torch.float32, torch.float64, torch.bfloat16, torch.float16}
    assert {case.training for case in cases} == {True, False}
    assert {case.device for case in cases} == {"cpu", "meta"}


def test_cases_are_found_by_their_id() -> None:
    assert all(model_case(case.id) is case for case in zoo())
    with pytest.raises(KeyError, match="the zoo has no case 'no such model'"):
        model_case("no such model")


@pytest.mark.parametrize("case", zoo()[::7], ids=lambda case: case.id)
def test_graphs_compute_what_their_models_do(case: ModelCase) -> None:
    if case.device == "meta":
        pytest.skip("nothing is computed")
    captured = case.capture()
    expected = run_once(captured.model, case.example())
    found = behaviour_of(captured.graph_module, case.example(), gradients=False)
    assert not list(differing(expected.output, found.outcome.output))


def test_capturing_twice_gives_equal_graphs_of_their_own() -> None:
    case = model_case("attention[modules]")
    one, other = case.capture().graph_module, case.capture().graph_module
    assert one is not other
    assert one.graph is not other.graph
    assert picture(one) == picture(other)


@pytest.mark.parametrize("form", ["modules", "export"])
def test_what_a_pass_writes_into_a_model_is_gone_the_next_time(form: Form) -> None:
    case = model_case("blocks[modules]").variant(form=form)
    first = case.capture()
    before = bits_of(list(first.model.parameters()))
    for parameter in first.model.parameters():
        parameter.data.mul_(2)  # of which no version tells
    assert bits_of(list(case.capture().model.parameters())) == before
    first = case.capture()
    next(first.model.parameters()).requires_grad_(False)
    assert all(parameter.requires_grad for parameter in case.capture().model.parameters())


def test_other_inputs_are_offered() -> None:
    names = [name for name, _ in model_case("pair[modules]").all_inputs()]
    assert names == ["a batch of 1", "a batch of 7", "an empty batch", "inputs that are not contiguous"]
    sizes = [inputs.args[0].shape[0] for _, inputs in model_case("pair[modules]").all_inputs()]
    assert sizes == [1, 7, 0, 3]


def test_a_case_says_what_is_wrong_with_it() -> None:
    with pytest.raises(ValueError, match="has form 'aten', expected one of"):
        ModelCase("mine", nn.ReLU, torch.ones(1), form="aten")  # type: ignore[arg-type]  # that is what is wrong
    with pytest.raises(TypeError, match="expected a function that makes one"):
        ModelCase("mine", nn.ReLU(), torch.ones(1))
