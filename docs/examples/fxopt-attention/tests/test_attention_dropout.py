from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

from fxopt_attention import RemoveDropout
from fxopt_core import compose, history
from fxopt_testing import assert_left_alone, assert_rewrites, conformance_tests


class Block(nn.Module):
    """Dropout as a module that is called twice, and as a function."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(4, 4), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.drop(self.linear(self.drop(x))), 0.5, training=self.training)


X = torch.randn(3, 4)

test_conformance = conformance_tests(RemoveDropout(), RemoveDropout(where="drop*"))


def test_modules_and_functions() -> None:
    graph_module = assert_rewrites(
        RemoveDropout(), Block().eval(), X, count=2, after="linear = self.linear(x); return linear"
    )
    assert not hasattr(graph_module, "drop")


@pytest.mark.parametrize("form", ["functions", "export"])
def test_other_forms_of_graphs(form: Literal["functions", "export"]) -> None:
    assert_rewrites(RemoveDropout(), Block().eval(), X, count=3, form=form)


def test_where() -> None:
    result = assert_rewrites(RemoveDropout(where="dropout*"), Block().eval(), X, count=1, refused=["filtered"])
    assert [rewrite.site for rewrite in history(result)[-1].rewrites] == ["dropout"]


def test_what_trains_stays() -> None:
    assert_left_alone(RemoveDropout(), Block().train(), X, reason="training")


def test_what_has_hooks_stays() -> None:
    block = Block().eval()
    block.drop.register_forward_hook(lambda *_: None)
    refusals = assert_left_alone(RemoveDropout(where="drop"), block, X, reason="hooks")
    assert "`drop` has hooks" in {refusal.reason: refusal.message for refusal in refusals}["hooks"]


def test_a_module_inside_of_one_that_is_called_as_a_whole_stays_where_it_is() -> None:
    class Leaf(torch.fx.Tracer):
        def is_leaf_module(self, module: nn.Module, qualified_name: str) -> bool:
            return isinstance(module, Block) or super().is_leaf_module(module, qualified_name)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.block = Block()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = self.block(x) + self.block.drop(x)
            return y

    model = Outer().eval()
    graph_module = assert_rewrites(RemoveDropout(), torch.fx.GraphModule(model, Leaf().trace(model)), X, count=1)
    assert isinstance(graph_module.get_submodule("block.drop"), nn.Dropout)


def test_twice_is_once() -> None:
    result = compose(RemoveDropout(), RemoveDropout())(torch.fx.symbolic_trace(Block().eval()))
    assert [len(record.rewrites) for record in history(result)] == [2, 0]
