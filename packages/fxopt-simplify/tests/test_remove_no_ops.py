"""`RemoveNoOps`: what changes nothing goes, what only seems to change nothing stays."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from simplify_models import X
from site_passes import Called, Computes
from torch import Tensor, nn

from fxopt_core import iter_nodes
from fxopt_simplify import RemoveNoOps
from fxopt_testing import assert_rewrites
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import refused

FORMS: tuple[Form, ...] = ("modules", "functions", "export-dynamic")
Function = Callable[[Tensor], Any]

IN_EACH_FORM: dict[str, Function] = {
    "a slice of everything": lambda x: F.relu(x)[:].abs(),
    "a slice of everything, which is written": lambda x: x.sin()[:].add_(1).relu_().abs(),
    "several slices of everything": lambda x: F.relu(x)[:, :].abs(),
    "expand to nothing new": lambda x: F.relu(x).expand(-1, -1).abs(),
    "dropout that does not train": lambda x: F.dropout(F.relu(x), 0.5, False).abs(),
    "a product with 1": lambda x: (x.double() * 1).abs(),
    "a product with 1.0": lambda x: (1.0 * x.double()).abs(),
    "a quotient by 1": lambda x: (x.double() / 1).abs(),
    "a power of 1": lambda x: (x.double() ** 1).abs(),
    "a conversion to what a comparison gives": lambda x: (x > 0).to(torch.bool).logical_not(),
    "a second conversion": lambda x: x.to(torch.float64).to(torch.float64).abs(),
    "a method that converts twice": lambda x: x.double().double().abs(),
    "a clone": lambda x: F.relu(x).clone().abs(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("function", IN_EACH_FORM.values(), ids=list(IN_EACH_FORM))
def test_a_call_that_changes_nothing_is_removed_in_each_form(function: Function, form: Form) -> None:
    assert_rewrites(RemoveNoOps(), Called(function), X, count=1, form=form, others=[(X[:1],)], exact=True)


@pytest.mark.parametrize(
    "layer", [nn.Identity(), nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout(), nn.Dropout(0.1, inplace=True)], ids=str
)
def test_identities_and_dropout_in_eval_mode_are_removed(layer: nn.Module) -> None:
    model = nn.Sequential(nn.ReLU(), layer, nn.Conv2d(3, 3, 1), nn.Sequential(layer)).eval()
    images = torch.randn(2, 3, 4, 4)
    found = assert_rewrites(RemoveNoOps(), model, images, count=2, exact=True)
    assert [type(each) for each in found.children()] == [nn.ReLU, nn.Conv2d]


def test_dropout_in_train_mode_is_refused() -> None:
    graph_module = RemoveNoOps()(torch.fx.symbolic_trace(nn.Sequential(nn.Dropout(), nn.Identity())))
    assert refused(graph_module) == [("_0", "training")]
    assert [name for name, _ in graph_module.named_children()] == ["0"]
    assert_rewrites(RemoveNoOps(), Called(lambda x: F.dropout(F.relu(x), 0.0, True).abs()), X, count=0)


def test_modules_with_hooks_and_subclasses_stay() -> None:
    class Loud(nn.Identity):
        def forward(self, input: Any) -> Any:
            return input * 2

    hooked = nn.Identity()
    hooked.register_forward_hook(lambda module, args, output: output + 1)
    assert_rewrites(RemoveNoOps(), nn.Sequential(hooked, Loud()).eval(), X, count=0)


STAY: dict[str, Function] = {
    "a returned view": lambda x: F.relu(x)[:],
    "a returned copy": lambda x: F.relu(x).clone(),
    "the view of a returned value": lambda x: F.relu(x).clone()[:2],
    "part of a slice": lambda x: F.relu(x)[1:].abs(),
    "a slice with steps": lambda x: F.relu(x)[::2].abs(),
    "expand of one row": lambda x: F.relu(x[:1]).expand(3, -1).abs(),
    "an input in another dtype": lambda x: x.to(torch.float32).abs(),
    "an input on another device": lambda x: x.to("cpu").abs(),
    "a sum with 0.0, as of -0.0": lambda x: 1 / (-F.relu(x) + 0.0),
    "a product that changes the dtype": lambda x: (x.argmax(1) * 1.0).sqrt(),
    "a quotient of integers": lambda x: (x.argmax(1) / 1).sqrt(),
    "1 over": lambda x: (1 / (F.relu(x) + 1)).abs(),
    "a view whose sizes change in place": lambda x: F.relu(x)[:].t_().abs(),
    "a view that is an output, and may be resized": lambda x: torch.add(x, 1, out=F.relu(x)[:]).abs(),
    "a copy that is written": lambda x: F.relu(x).clone().add_(1).abs(),
    "a copy whose original is written": lambda x: _write(F.relu(x)),
    "a clone of an expanded value, whose strides matter": lambda x: x[:1].expand(4, 4).clone().view(16),
    "a view as other numbers": lambda x: F.relu(x).view(torch.int32).abs(),
}


def _write(y: Tensor) -> Tensor:
    copied = y.clone()
    y.add_(1)
    return copied * y


WHY = {
    "a returned view": "returned",
    "a view whose sizes change in place": "mutated",
    "a copy that is written": "mutated",
    "a copy whose original is written": "mutated",
}


@pytest.mark.parametrize("name", STAY)
def test_a_call_that_does_something_stays(name: str) -> None:
    reasons = [WHY[name]] if name in WHY else None
    model = Called(STAY[name])
    assert_rewrites(RemoveNoOps(), model, X, count=0, refused=reasons, gradients=False, exact=True)


def test_only_constants_are_not_detached() -> None:
    """A copy of a constant needs no ``detach_``; a value that gradients reach does."""
    model = Computes(lambda m, x: (x * m.scale).detach_() * torch.tensor(2.0), scale=nn.Parameter(torch.ones(4)))
    found = assert_rewrites(RemoveNoOps(), model, X, count=1, form="export", exact=True)
    (node,) = [each for each in iter_nodes(found.graph) if "detach_" in str(each.target)]
    node.args, node.kwargs = (), {"self": node.all_input_nodes[0]}
    RemoveNoOps()(found, expect=0)


def test_shapes_of_an_example_are_no_proof() -> None:
    """A traced graph runs at other sizes, where the call does something; an export is right for its sizes alone."""
    model = Called(lambda x: F.relu(x).reshape(3, 4).abs())
    assert_rewrites(RemoveNoOps(), model, X, count=0)
    assert_rewrites(RemoveNoOps(), model, X, count=1, form="export")


IN_ANOTHER_DTYPE: dict[str, Function] = {
    "a product": lambda x: (x * 1.0).neg(),
    "a quotient": lambda x: (x.relu() / 1).neg(),
    "a choice": lambda x: torch.where(torch.arange(x.shape[1]) >= 0, x, 0.0).neg(),
    "a view in a dtype": lambda x: x.view(torch.float32).neg(),
}


@pytest.mark.parametrize("function", IN_ANOTHER_DTYPE.values(), ids=list(IN_ANOTHER_DTYPE))
def test_inputs_may_be_integers_where_the_example_was_not(function: Function) -> None:
    integers = torch.tensor([[3, 2, 1, 0]], dtype=torch.int32)
    others = [(integers,), (integers.to(torch.uint8),)]
    assert_rewrites(RemoveNoOps(), Called(function), X, count=0, others=others, exact=True, gradients=False)


def test_a_captured_graph_refuses_integers_itself() -> None:
    assert_rewrites(RemoveNoOps(), Called(lambda x: (x * 1.0).neg()), X, count=1, form="capture")


def test_a_mask_of_ones_is_dropped() -> None:
    """``positions >= 0`` holds for all positions, so that neither ``where`` nor ``&`` nor attention needs it."""

    def masked(x: Tensor) -> Tensor:
        ones = torch.arange(x.shape[0])[:, None].expand(x.shape[0], x.shape[1]) >= 0
        both = ones & (x > 0)
        return torch.where(ones, x.double(), 0.0).abs() * both + x.abs().masked_fill(~ones, 3.0)

    found = assert_rewrites(RemoveNoOps(), Called(masked), X, count=4, form="export-dynamic", others=[(X[:2],)])
    names = {str(node.target) for node in iter_nodes(found.graph) if node.users}
    assert not names & {"aten.where.ScalarOther", "aten.__and__.Tensor"}


@pytest.mark.parametrize("mask_of", ["booleans", "minus zeros"])
def test_attention_loses_a_mask_that_masks_nothing(mask_of: str) -> None:
    """A mask of True, and ``(1 - ones) * min``, which adds zeros."""

    def attend(x: Tensor) -> Tensor:
        q, mask = x[None, None], torch.ones(x.shape[0], x.shape[0], dtype=torch.bool)
        if mask_of == "minus zeros":
            mask = (1.0 - mask.to(torch.float32)) * torch.finfo(torch.float32).min
        return F.scaled_dot_product_attention(q, q * 2, q * 3, attn_mask=mask)

    found = assert_rewrites(RemoveNoOps(), Called(attend), X, count=1, form="export-dynamic", others=[(X[:2],)])
    (attention,) = [node for node in iter_nodes(found.graph) if "scaled_dot" in str(node.target)]
    assert len(attention.args) == 3
    assert "attn_mask" not in attention.kwargs


UNKNOWN: dict[str, Function] = {
    "of the input": lambda x: torch.where(x > 0, x, x.abs()),
    "later positions": lambda x: torch.where(torch.arange(x.shape[1]) >= 1, x.relu(), 0.0).abs(),
    "overflowing": lambda x: torch.where(torch.arange(x.shape[1]) + (2**63 - 1) >= 0, x.relu(), x + 1).abs(),
}


@pytest.mark.parametrize("name", UNKNOWN)
def test_a_mask_of_unknown_values_stays(name: str) -> None:
    assert_rewrites(RemoveNoOps(), Called(UNKNOWN[name]), X, count=0, form="export-dynamic", exact=True)


def test_a_chain_disappears_as_a_whole() -> None:
    chain = Called(lambda x: (x.double()[:] * 1).expand(-1, -1).abs())
    found = assert_rewrites(RemoveNoOps(), chain, X, count=3)
    assert [node.name for node in iter_nodes(found.graph)] == ["x", "double", "abs_1", "output"]
