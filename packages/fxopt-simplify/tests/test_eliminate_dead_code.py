"""`EliminateDeadCode`: what nothing reads goes, unless it does something else."""

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
from fxopt_simplify import EliminateDeadCode
from fxopt_testing import assert_rewrites
from fxopt_testing.rewrites import refused


def _first(*values: Any) -> Any:
    return values[0]


def test_a_chain_without_a_reader_is_removed() -> None:
    model = Called(lambda x: _first(x + 1, (x * 2).sum(0).sqrt()))
    found = assert_rewrites(EliminateDeadCode(), model, X, count=3)
    assert not [node for node in iter_nodes(found.graph) if node.op.startswith("call_f") and not node.users]


def test_a_module_without_weights_goes_with_its_call() -> None:
    model = Computes(lambda m, x: _first(m.often(x + 1), m.act(m.often(x))), act=nn.GELU(), often=nn.ReLU())
    found = assert_rewrites(EliminateDeadCode(), model, X, count=2)
    assert [name for name, _ in found.named_children()] == ["often"]


def test_a_layer_keeps_its_weights() -> None:
    """Its weights would be unused, and an undo could not bring them back; a second call may go."""
    model = Computes(lambda m, x: _first(x * 2, m.fc(x)), fc=nn.Linear(4, 4))
    found = assert_rewrites(EliminateDeadCode(), model, X, count=0)
    assert refused(found) == [("fc", "holds-weights")]
    twice = Computes(lambda m, x: _first(m.fc(x * 2), m.fc(x)), fc=nn.Linear(4, 4))
    assert_rewrites(EliminateDeadCode(), twice, X, count=1)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: _first(x, x.add_(1)),
        lambda x: _first(x * 1, torch.rand_like(x)),
        lambda x: _first(x * 1, F.dropout(x, 0.5, True)),
        lambda x: _first(x * 1, torch._assert(x.shape[0] > 0, "empty")),  # type: ignore[no-untyped-call]  # so it is in torch
    ],
    ids=["a write", "random numbers", "dropout", "a check"],
)
def test_what_does_something_else_stays(function: Callable[[Tensor], Any]) -> None:
    graph = torch.fx.symbolic_trace(Called(function), concrete_args=None).graph
    graph_module = torch.fx.GraphModule(nn.Module(), graph)
    before = [node.name for node in iter_nodes(graph)]
    EliminateDeadCode()(graph_module)
    called = [node.name for node in iter_nodes(graph_module.graph)]
    assert [name for name in called if name in before][-2:] == before[-2:]
