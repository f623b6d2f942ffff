"""Assertions for authors: what holds passes, and what does not is shown."""

from __future__ import annotations

from collections.abc import Callable

import defects_of_computation as computation
import defects_of_passes as passes
import defects_of_results as results
import pytest
import torch
from torch import nn

from fxopt_core import PreconditionError, Transformation
from fxopt_testing import assert_code, assert_left_alone, assert_rewrites, code_of
from fxopt_testing.forms import Form
from fxopt_testing.models.linear import CalledTwice, Pair
from fxopt_testing.rewrites import FORMS, refusals
from fxopt_tools import Inputs


class Product(nn.Module):
    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        return torch.relu(x * 2.0)


def test_code_is_compared_without_its_layout() -> None:
    graph_module = torch.fx.symbolic_trace(Product())
    assert_code(graph_module, "mul = x * 2.0; relu = torch.relu(mul); return relu")
    assert_code(
        graph_module, "def forward(self, x, y=None):\n    mul = (x * 2.0)\n    relu = torch.relu(mul)\n    return relu"
    )
    assert code_of(graph_module).startswith("def forward(self, x, y=None):\n    mul = x * 2.0\n")
    assert code_of(graph_module.graph) == code_of(graph_module)


def test_another_code_is_shown_as_a_difference() -> None:
    with pytest.raises(AssertionError, match=r"(?s)differs from.*-    mul = x \* 3.0.*\+    mul = x \* 2.0"):
        assert_code(torch.fx.symbolic_trace(Product()), "mul = x * 3.0; relu = torch.relu(mul); return relu")


def test_what_is_no_code_is_said_so() -> None:
    with pytest.raises(PreconditionError, match="not Python code"):
        assert_code(torch.fx.symbolic_trace(Product()), "mul = = 2")


@pytest.mark.parametrize("form", ["modules", "functions"])
def test_rewrites_are_counted_and_shown(form: Form) -> None:
    before, after = (
        "mul = x * 2.0; relu = torch.relu(mul); return relu",
        "mul = 2.0 * x; relu = torch.relu(mul); return relu",
    )
    result = assert_rewrites(
        passes.Commuting(), Product(), torch.ones(2), count=1, before=before, after=after, form=form
    )
    assert "2.0 * x" in result.code
    with pytest.raises(AssertionError, match="rewrote 1 site, expected 2"):
        assert_rewrites(passes.Commuting(), Product(), torch.ones(2), count=2)
    with pytest.raises(AssertionError, match="after commuting, the graph differs"):
        assert_rewrites(passes.Commuting(), Product(), torch.ones(2), after=before)
    with pytest.raises(AssertionError, match="before commuting, the graph differs"):
        assert_rewrites(passes.Commuting(), Product(), torch.ones(2), before=after)


def test_the_model_is_not_changed() -> None:
    model = Pair(q_bias=False, k_bias=False).eval()
    keys = list(model.state_dict())
    result = assert_rewrites(results.Padding(), model, torch.ones(2, 4), count=2, form="export")
    assert list(result.state_dict()) != keys == list(model.state_dict())


def test_graph_modules_and_keyword_arguments_are_taken() -> None:
    graph_module = torch.fx.symbolic_trace(Product())
    assert_rewrites(passes.Commuting(), graph_module, torch.ones(2), count=1)
    assert "x * 2.0" in graph_module.code
    assert_rewrites(passes.Commuting(), Product(), Inputs(x=torch.ones(2)), count=1)


def test_a_pass_that_changes_nothing_rewrites_nothing() -> None:
    with pytest.raises(AssertionError, match="finds-nothing changed nothing"):
        assert_rewrites(passes.FindsNothing(), Product(), torch.ones(2))


def test_refusals_are_expected_by_their_reasons() -> None:
    model, x = CalledTwice(), torch.ones(2, 4)
    with pytest.raises(AssertionError, match="refused 4 sites, expected reasons: none"):
        assert_rewrites(results.RefusesBadly(), model, x, count=0, refused=[])
    assert_rewrites(results.RefusesBadly(), model, x, count=0, refused=["Not Supported"] * 4)


def test_near_misses_are_left_alone_for_a_reason() -> None:
    assert_left_alone(results.Padding(), Pair(), torch.ones(2, 4))
    with pytest.raises(AssertionError, match="refused nothing for reason 'tied-parameter'"):
        assert_left_alone(results.Padding(), Pair(), torch.ones(2, 4), reason="tied-parameter")
    with pytest.raises(AssertionError, match="should leave the model alone, but"):
        assert_left_alone(results.Padding(), Pair(q_bias=False, k_bias=False), torch.ones(2, 4))
    refusals = assert_left_alone(results.RefusesBadly(), CalledTwice(), torch.ones(2, 4), reason="Not Supported")
    assert len(refusals) == 4


class Of(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], *layers: nn.Module) -> None:
        super().__init__()
        self.function, self.layers = function, nn.Sequential(*layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.function(self.layers(x))


FROZEN = Of(lambda x: x * 2.0, nn.Linear(4, 4)).requires_grad_(False)


@pytest.mark.parametrize("form", FORMS)
def test_all_that_holds_of_a_rewrite_is_checked_in_every_form(form: Form) -> None:
    x, others = torch.ones(2, 4), [(torch.ones(5, 4),), (torch.ones(0, 4),)]
    rewritten = assert_rewrites(
        results.Padding(), Pair(q_bias=False, k_bias=False).eval(), x, count=2, form=form, others=others
    )
    assert refusals(rewritten) == ()


@pytest.mark.parametrize(
    ("transformation", "model", "found"),
    [
        (computation.ClaimsWrongly(), Of(lambda x: x * 2.0), "computes something else: outputs: `output` differs"),
        (computation.WritesCopies(), Of(lambda x: x.mul_(2.0)), r"effects: `args\[0\] after the call` differs"),
        (computation.Detaches(), Of(torch.tanh), r"gradients: the gradient of `args\[0\]` differs"),
        (computation.AddsEachTime(), Of(torch.relu), "a second time, order of nodes is"),
        (results.WrongPiece(), Pair(q_bias=False, k_bias=False), "after undoing wrong-piece, values of `q.weight`"),
        (results.WritesCaller(), FROZEN, "in the caller's model, values of"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, (Transformation, nn.Module)) else None,
)
def test_what_does_not_hold_of_a_rewrite_is_found(transformation: Transformation, model: nn.Module, found: str) -> None:
    with pytest.raises(AssertionError, match=found):
        assert_rewrites(transformation, model, torch.full((2, 4), 5.0))


def test_what_is_no_model_is_said_so() -> None:
    with pytest.raises(PreconditionError, match=r"write Product\(\)"):
        assert_left_alone(passes.Commuting(), Product, torch.ones(2))  # type: ignore[arg-type]  # that is what is wrong
