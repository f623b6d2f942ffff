"""Checkpoints of the original model in models with merged layers and fused biases, in every form of graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_checkpoints.load import load_original_state_dict, original_state_dict
from fxopt_checkpoints.trace import key_map
from fxopt_core import compose
from fxopt_linear import FuseBiasInLinear, MergeLinears
from fxopt_testing.rewrites import graph_of

ORDERS: dict[str, Callable[[], Any]] = {
    "merge": lambda: MergeLinears(),
    "fuse": lambda: FuseBiasInLinear(),
    "merge, fuse": lambda: compose(MergeLinears(), FuseBiasInLinear()),
    "fuse, merge": lambda: compose(FuseBiasInLinear(), MergeLinears()),
}
every_order = pytest.mark.parametrize("order", list(ORDERS))


class Attention(nn.Module):
    """Grouped-query attention: 8, 2 and 2 rows, one layer without bias; a head that is tied to an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 4)
        self.q = nn.Linear(4, 8)
        self.k = nn.Linear(4, 2, bias=False)
        self.v = nn.Linear(4, 2)
        self.out = nn.Linear(8, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Any:
        x = self.embed(ids)
        y = self.q(x) + torch.cat([self.k(x), self.v(x)] * 2, -1)
        return self.head(self.out(torch.relu(y)))


IDS = torch.tensor([[0, 1, 2], [3, 4, 0]])


def attention(seed: int = 0) -> Attention:
    torch.manual_seed(seed)
    return Attention().eval()


def rewritten(order: str, seed: int = 0, dtype: torch.dtype = torch.float32) -> GraphModule:
    result: GraphModule = ORDERS[order]()(graph_of(attention(seed).to(dtype), "modules", IDS))
    return result


def assert_equal(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert list(one) == list(other)
    for key, value in one.items():
        assert value.dtype == other[key].dtype and torch.equal(value, other[key]), key


@every_order
def test_a_checkpoint_goes_in_and_comes_back_bit_for_bit(order: str) -> None:
    graph_module, new = rewritten(order), attention(1)
    before, checkpoint = (graph_of(model, "modules", IDS) for model in (attention(), new))
    assert list(key_map(graph_module).original_keys) == list(before.state_dict())
    assert_equal(original_state_dict(graph_module), before.state_dict())
    load_original_state_dict(graph_module, checkpoint.state_dict())
    assert_equal(graph_module.state_dict(), rewritten(order, 1).state_dict())
    torch.testing.assert_close(graph_module(IDS), new(IDS))
    saved = original_state_dict(graph_module)
    assert_equal(saved, checkpoint.state_dict())
    assert str(before.load_state_dict(saved)) == "<All keys matched successfully>"


def test_original_parameters_that_share_memory_see_what_is_loaded() -> None:
    model = attention()
    graph_module = MergeLinears(share_storage=True)(graph_of(model, "modules", IDS))
    load_original_state_dict(graph_module, attention(1).state_dict())
    for key in ("q.weight", "k.weight", "v.bias"):
        assert torch.equal(model.get_parameter(key), attention(1).get_parameter(key))
    saved = original_state_dict(graph_module)
    assert_equal(saved, attention(1).state_dict())
    assert saved["q.weight"].untyped_storage().nbytes() == 8 * 4 * 4


def test_the_table_says_where_a_stand_in_is_now() -> None:
    """The merged bias, in which zeros stand for an absent one, is a column of a weight by now."""
    graph_module = compose(MergeLinears(), FuseBiasInLinear())(torch.fx.symbolic_trace(Attention().eval()))
    (row,) = [line for line in str(key_map(graph_module)).splitlines() if "stands in" in line]
    assert row.split()[-2:] == ["q_k_v_merged_with_bias.weight[:,", "4][8:10]"]


def test_weights_and_biases_of_one_local_name() -> None:
    class Holder(nn.Module):
        def __init__(self, *shape: int) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(*shape))

    class Functions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c, self.d = Holder(4, 4), Holder(4), Holder(4, 4), Holder(4)

        def forward(self, x: Tensor) -> Tensor:
            first = nn.functional.linear(x, self.a.weight, self.b.weight)
            return first - nn.functional.linear(x, self.c.weight, self.d.weight).relu()

    model, other, x = Functions().eval(), Functions().eval(), torch.randn(2, 4)
    graph_module = MergeLinears()(torch.fx.symbolic_trace(model), expect=1)
    load_original_state_dict(graph_module, other.state_dict())
    torch.testing.assert_close(graph_module(x), other(x))
    graph_module = MergeLinears()(graph_module, reverse=True)
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in graph_module.state_dict().items())
