"""The shipped reversible passes, applied and reversed in every order."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_arith.true_division import ChangeTrueDivToMulByInverse
from fxopt_core import ReversibleTransformation
from fxopt_core.errors import UndoError
from fxopt_linear.fuse_bias import FuseBiasInLinear
from fxopt_linear.merge_linears import MergeLinears
from fxopt_rewrite import infer_shapes

PASSES: dict[str, ReversibleTransformation] = {
    "merge": MergeLinears(),
    "divide": ChangeTrueDivToMulByInverse(),
    "bias": FuseBiasInLinear(),
}
ORDERS = list(itertools.permutations(PASSES))


class Layers(nn.Module):
    """Quotients of layers, layers of quotients, and quotients of both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scaled = (self.a(x) / 8 + self.b(x)) / 3
        return self.c(scaled) / 5 - self.d(scaled), scaled / 7


def traced() -> GraphModule:
    torch.manual_seed(0)
    return infer_shapes(symbolic_trace(Layers().eval()), torch.ones(2, 4))


@pytest.mark.parametrize("back", ORDERS, ids=" ".join)
@pytest.mark.parametrize("order", ORDERS, ids=" ".join)
def test_all_orders(order: tuple[str, ...], back: tuple[str, ...]) -> None:
    graph_module, value = traced(), torch.randn(2, 4)
    code, outputs = graph_module.code, graph_module(value)
    state = {key: tensor.clone() for key, tensor in graph_module.state_dict().items()}
    for name in order:
        PASSES[name](graph_module)
    waiting = list(back)
    while waiting:
        name = next(name for name in waiting if reversed_or_refused(name, graph_module, order, waiting))
        waiting.remove(name)
        torch.testing.assert_close(graph_module(value), outputs)
    assert graph_module.code == code
    assert list(graph_module.state_dict()) == list(state)
    for key, tensor in graph_module.state_dict().items():
        torch.testing.assert_close(tensor, state[key], rtol=0, atol=0)


def reversed_or_refused(name: str, graph_module: GraphModule, order: tuple[str, ...], waiting: list[str]) -> bool:
    """Reverse a pass; one that a later pass builds on has to wait, and the error names that pass."""
    code = graph_module.code
    try:
        PASSES[name](graph_module, reverse=True)
    except UndoError as error:
        later = [PASSES[other].name for other in waiting if order.index(other) > order.index(name)]
        assert any(f"undo `{other}` first" in str(error) for other in later)
        assert graph_module.code == code
        return False
    return True
