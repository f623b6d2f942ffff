"""`check_transformation`: what it takes, what it reports, how it is told."""

from __future__ import annotations

import defects_of_computation as computation
import defects_of_passes as passes
import defects_of_results as results
import pytest
import torch
from torch import nn

import fxopt_testing
from fxopt_core import LintAndRecompile, PreconditionError, compose
from fxopt_testing import PROPERTIES, ConformanceError, ModelCase, check_transformation, model_case, zoo

PAIR = model_case("pair[modules]")


def test_findings_read_as_advice() -> None:
    with pytest.raises(ConformanceError) as raised:
        check_transformation(computation.ClaimsWrongly(), models=[PAIR])
    text = str(raised.value)
    assert text.startswith("ClaimsWrongly() does not conform, ")
    for part in ("same-outputs on pair[modules]", "rule:  ", "found:  ", "expected:  ", "do:  ", "reproduce: "):
        assert part in text, part
    assert isinstance(raised.value, AssertionError)
    assert raised.value.report.primary is raised.value.report.findings[0]


def test_a_reproduction_runs_by_itself() -> None:
    report = check_transformation(results.Unfreezes(), models=[model_case("frozen[modules]")], raises=False)
    assert report.primary is not None
    with pytest.raises(ConformanceError, match="flags-kept"):
        exec(report.primary.reproduction, {**vars(fxopt_testing), "Unfreezes": results.Unfreezes})


def test_the_smallest_model_is_named_first() -> None:
    models = [model_case("attention[modules]"), PAIR]
    report = check_transformation(passes.WalksUsersEachTime(), models=models, properties=["runs"], raises=False)
    assert report
    report = check_transformation(results.KeepsDeadModules(), models=models, raises=False)
    assert report.primary is not None
    assert report.primary.case == "pair[modules]"
    assert report.primary.also == ("attention[modules]",)


def test_what_is_no_pass_is_said_so() -> None:
    with pytest.raises(PreconditionError, match=r"Commuting'>, .* write Commuting\(\)"):
        check_transformation(passes.Commuting)  # type: ignore[arg-type]  # that is what is wrong
    with pytest.raises(PreconditionError, match="there is no property 'same-output'; there are "):
        check_transformation(passes.Commuting(), properties=["same-output"])


def test_models_of_ones_own_are_tried() -> None:
    case = ModelCase("mine", lambda: nn.Sequential(nn.Linear(4, 2)), torch.ones(3, 4))
    report = check_transformation(results.Unfreezes(), models=[case.variant(form="functions"), case])
    assert report
    assert {row.checked for row in report.rows if row.name == "same-outputs"} == {1}
    frozen = ModelCase("mine", lambda: nn.Sequential(nn.Linear(4, 2)).requires_grad_(False), torch.ones(3, 4))
    report = check_transformation(results.Unfreezes(), models=[frozen], raises=False)
    assert report.primary is not None
    assert "models=[ModelCase('mine', ..., form='modules')]" in report.primary.reproduction


def test_expected_failures_make_nothing_fail() -> None:
    known = {"no-leftovers": "kept for the next pass", "same-gradients": "kept for the next pass"}
    report = check_transformation(results.KeepsDeadModules(), models=[PAIR], expected_failures=known)
    assert report
    assert {row.name for row in report.rows if row.verdict == "known"} == set(known)
    with pytest.raises(ConformanceError, match="it holds, and was expected not to: why"):
        check_transformation(passes.Commuting(), models=[PAIR], expected_failures={"runs": "why"})


def test_compositions_are_passes() -> None:
    assert check_transformation(
        compose(results.Padding(), LintAndRecompile()), models=[*zoo()[:8], model_case("pair without bias[modules]")]
    )
    report = check_transformation(
        compose(results.Padding(), results.Unfreezes()), models=[model_case("frozen[modules]")], raises=False
    )
    assert report.primary is not None
    assert report.primary.property == "flags-kept"


def test_a_report_is_a_table() -> None:
    report = check_transformation(results.Padding(), models=[PAIR], raises=False)
    lines = str(report).splitlines()
    assert lines[0].startswith("Padding(): ")
    assert [line.split()[0] for line in lines[2 : 2 + len(PROPERTIES)]] == [rule.name for rule in PROPERTIES]


def test_every_property_says_what_to_do() -> None:
    names = [rule.name for rule in PROPERTIES]
    assert len(set(names)) == len(names) == 31
    for rule in PROPERTIES:
        assert rule.advice.endswith((".", "?")), rule.name
        assert rule.statement[0].islower(), rule.name
        assert (rule.on_model is None) != (rule.on_pass is None)


def test_checks_leave_the_process_as_it_was() -> None:
    state = torch.get_rng_state()
    check_transformation(results.DrawsRandomNumbers(), models=[PAIR], raises=False)
    check_transformation(passes.SwitchesGradientsOff(), models=[PAIR], raises=False)
    assert torch.is_grad_enabled()
    assert torch.equal(torch.get_rng_state(), state)
