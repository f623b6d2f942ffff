"""`Effects.needs_own_memory`: on common patterns, and against runs in which the value is a slice."""

from __future__ import annotations

import operator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node, symbolic_trace
from torch.fx.passes.shape_prop import ShapeProp

from fxopt_core import iter_nodes
from fxopt_rewrite import Effects, infer_shapes

ROWS, COLUMNS = 5, 8


def as_slice(value: Tensor) -> Tensor:
    """An equal slice of a larger tensor."""
    larger = torch.full((*value.shape[:-1], value.shape[-1] + 3), 7.0, dtype=value.dtype)
    larger[..., : value.shape[-1]] = value
    return larger[..., : value.shape[-1]]


class SlicingRun(Interpreter):
    """Runs a graph with the value of one node, if any, replaced by a slice."""

    def __init__(self, module: nn.Module, sliced: Node | None, graph: Graph | None = None) -> None:
        super().__init__(module, garbage_collect_values=False, graph=graph)
        self.extra_traceback = False
        self.sliced = sliced

    def run_node(self, n: Node) -> Any:
        value = super().run_node(n)
        return as_slice(value) if n is self.sliced else value


def check_by_running(graph_module: GraphModule, node: Node, *inputs: Tensor) -> None:
    """Check that nothing changes if a node's value becomes a slice."""
    expected = graph_module(*(x.clone() for x in inputs))
    found = SlicingRun(graph_module, node).run(*(x.clone() for x in inputs))
    torch.testing.assert_close(found, expected)


class Model(nn.Module):
    """A linear layer and what a function makes of its result."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(4, COLUMNS)
        self.inplace, self.norm = nn.ReLU(inplace=True), nn.LayerNorm(COLUMNS)
        self.flat, self.split = nn.Flatten(), nn.Unflatten(-1, (2, 4))
        self.dropout, self.gru = nn.Dropout(0.0), nn.GRU(COLUMNS, 4, batch_first=True)
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(self, self.linear(x))


def linear_of(graph_module: GraphModule) -> Node:
    return next(node for node in iter_nodes(graph_module.graph) if "linear" in node.name and node.op != "get_attr")


X = torch.arange(3.0 * ROWS * 4).view(3, ROWS, 4).sin()
"""(3, rows, 4)"""


@torch.fx.wrap
def unknown(x: Tensor) -> Tensor:
    return x + 1


FINE: list[Any] = [
    lambda m, h: h + 1,
    lambda m, h: F.gelu(h),
    lambda m, h: F.softmax(h, -1),
    lambda m, h: F.relu(h).view(-1),
    lambda m, h: m.norm(h),
    lambda m, h: m.gru(h)[0],
    lambda m, h: m.flat(h).sum(),
    lambda m, h: m.split(h).sum(1),
    lambda m, h: m.dropout(h).exp(),
    lambda m, h: h.transpose(1, 2) @ h,
    lambda m, h: h.permute(2, 0, 1).exp(),
    lambda m, h: h.mT.exp(),
    lambda m, h: h.reshape(-1).exp(),
    lambda m, h: h.flatten().exp(),
    lambda m, h: h.flatten(1).exp(),
    lambda m, h: h.unflatten(-1, (2, 4)).exp(),
    lambda m, h: h.split(3, -1)[0].exp(),
    lambda m, h: h.chunk(2, dim=-1)[1].exp(),
    lambda m, h: h[:, 0].exp() + h[:, -1].exp(),
    lambda m, h: h[..., None].expand(-1, -1, -1, 2).exp(),
    lambda m, h: h.contiguous().view(-1).exp(),
    lambda m, h: h.transpose(1, 2).contiguous().view(3, -1).exp(),
    lambda m, h: F.dropout(h, training=False).exp(),
    lambda m, h: h.to(torch.float64).exp(),
    lambda m, h: h.float().view(3, -1, 2, 4).exp(),
    lambda m, h: h.view(3, -1, 2, 4).transpose(1, 2).exp(),
    lambda m, h: h.view(h.size(0), h.size(1), 2, 4).exp(),
    lambda m, h: h.view(-1, COLUMNS).exp(),
    lambda m, h: h.view((-1, 4, 2)).exp(),
    lambda m, h: h.view(size=(-1, 4, 2)).exp(),
    lambda m, h: h.detach().view(-1, 8).exp(),
    lambda m, h: torch.einsum("abc,abd->acd", h, h),
    lambda m, h: torch.einsum("abc->cab", h).exp(),
    lambda m, h: torch.ops.aten.atleast_3d.default(h).exp(),
    lambda m, h: torch.cat([h, h], -1),
    lambda m, h: h.size(0) * h.exp() * h.dim(),
    lambda m, h: F.scaled_dot_product_attention(h, h, h),
    lambda m, h: F.conv1d(h.transpose(1, 2), torch.ones(1, COLUMNS, 1)),
    lambda m, h: h.unbind(1)[0].exp(),
    lambda m, h: torch.ops.aten.view.default(h, [-1, 2, 4]).exp(),
    lambda m, h: torch.ops.aten._unsafe_view.default(h, [-1, 8]).exp(),
    lambda m, h: torch.ops.aten._softmax.default(h, -1, False),
]

NOTICED: list[Any] = [
    lambda m, h: h,
    lambda m, h: (h.view(-1, 8), 1),
    lambda m, h: {"hidden": h[0]},
    lambda m, h: h.transpose(0, 1),
    lambda m, h: h.add_(1).exp(),
    lambda m, h: m.inplace(h).exp(),
    lambda m, h: F.relu(h, inplace=True).exp(),
    lambda m, h: h[0].zero_().exp(),
    lambda m, h: h.reshape(-1).zero_().exp(),
    lambda m, h: torch.add(h, 1, out=h).exp(),
    lambda m, h: torch.mul(h.view(-1, 8).exp(), 1, out=h).exp(),
    lambda m, h: h.view(-1).exp(),
    lambda m, h: h.view(3, -1).exp(),
    lambda m, h: h.view(-1, 16).exp(),
    lambda m, h: h.view(-1, 2).view(-1, 8).exp(),
    lambda m, h: h.transpose(0, 1).view(-1, 3, 8).exp(),
    lambda m, h: h.view(torch.int32).abs(),
    lambda m, h: h.view_as(torch.relu(h)).exp(),
    lambda m, h: torch.as_strided(h, (2, 2), (1, 1)).exp(),
    lambda m, h: h.exp() * h.stride(0),
    lambda m, h: h.exp() if h.is_contiguous() is None else h.sin(),
    lambda m, h: h.exp() * h.storage_offset(),
    lambda m, h: h.data_ptr() + h.exp(),
    lambda m, h: torch.view_as_complex(h.view(-1, 4, 2)).abs(),
    lambda m, h: h.numpy(),
    lambda m, h: h.untyped_storage(),
    lambda m, h: unknown(h),
    lambda m, h: unknown(h.permute(1, 0, 2)),
    lambda m, h: h.frobnicate(),
    lambda m, h: h.contiguous(memory_format=torch.channels_last).exp(),
    lambda m, h: torch.ops.aten.select_scatter.default(h, h[0], 0, 1),
]


@pytest.mark.parametrize("function", FINE)
def test_fine_and_so_it_is_when_run(function: Any) -> None:
    graph_module = symbolic_trace(Model(function).eval())
    linear = linear_of(graph_module)
    assert not Effects(graph_module).needs_own_memory(linear)
    with torch.no_grad():
        check_by_running(graph_module, linear, X)


@pytest.mark.parametrize("function", NOTICED)
def test_noticed(function: Any) -> None:
    graph_module = symbolic_trace(Model(function).eval())
    assert Effects(graph_module).needs_own_memory(linear_of(graph_module))


# what known shapes add


BY_SHAPES: list[Any] = [
    lambda m, h: h.view(h.size(0), h.size(1), 2, -1).exp(),
    lambda m, h: h.view(operator.add(h.shape[:-1], (-1, 4))).exp(),
    lambda m, h: h.view(operator.add(h.shape[:-1], (h.shape[-1] // 4, 4))).exp(),
    lambda m, h: h.view_as(torch.relu(h)).exp(),
    lambda m, h: h.view(h.shape).exp(),
]


@pytest.mark.parametrize("function", BY_SHAPES)
def test_shapes_show_what_constants_do_not(function: Any) -> None:
    graph_module = symbolic_trace(Model(function).eval())
    linear = linear_of(graph_module)
    assert Effects(graph_module).needs_own_memory(linear)
    infer_shapes(graph_module, X)
    assert not Effects(graph_module).needs_own_memory(linear)
    for rows in (1, 2, ROWS):
        check_by_running(graph_module, linear, X[:, :rows])


BY_CHANCE: list[Any] = [
    lambda m, h: h.view(3, 5, -1).exp(),
    lambda m, h: h.view(3, 5, -1, 2).exp(),
    lambda m, h: h.view(3, h.size(1), -1).exp(),
]


@pytest.mark.parametrize("function", BY_CHANCE)
@pytest.mark.parametrize("propagate", [infer_shapes, lambda gm, x: ShapeProp(gm).propagate(x)])
def test_what_holds_by_chance_is_not_taken(function: Any, propagate: Any) -> None:
    """In a batch of another size, the view of a slice fails."""
    graph_module = symbolic_trace(Model(function).eval())
    propagate(graph_module, X)
    assert Effects(graph_module).needs_own_memory(linear_of(graph_module))


# attention


class Attention(nn.Module):
    """Attention with fewer heads for keys than for queries; heads of 8."""

    def __init__(self, *, style: str, keys: int = 2) -> None:
        super().__init__()
        self.query, self.key, self.value = nn.Linear(32, 32), nn.Linear(32, 8 * keys), nn.Linear(32, 8 * keys)
        self.out, self.style, self.repeats = nn.Linear(32, 32), style, 4 // keys

    def heads(self, x: Tensor) -> Tensor:
        if self.style == "bert":
            return x.view(operator.add(x.size()[:-1], (-1, 8))).permute(0, 2, 1, 3)
        if self.style == "t5":
            return x.view(x.shape[0], -1, x.shape[-1] // 8, 8).transpose(1, 2)
        return x.view(x.shape[0], x.shape[1], -1, 8).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.heads(self.query(x)), self.heads(self.key(x)), self.heads(self.value(x))
        query = query * 0.5 + torch.cat((-query[..., 4:], query[..., :4]), -1)
        key, value = (part[:, :, None].expand(-1, -1, self.repeats, -1, -1).flatten(1, 2) for part in (key, value))
        attended = F.scaled_dot_product_attention(query, key, value).transpose(1, 2)
        attended = attended.reshape(x.shape[0], -1, 32).contiguous()
        result: Tensor = self.out(attended)
        return result * 1


@pytest.mark.parametrize("style", ["bert", "llama", "t5"])
def test_attention_needs_no_memory_of_its_own_once_shapes_are_known(style: str) -> None:
    x = torch.randn(2, 6, 32)
    graph_module = infer_shapes(symbolic_trace(Attention(style=style).eval()), x)
    effects = Effects(graph_module)
    for node in iter_nodes(graph_module.graph):
        if node.target in {"query", "key", "value", "out"}:
            assert not effects.needs_own_memory(node)
            check_by_running(graph_module, node, x)
            check_by_running(graph_module, node, torch.randn(3, 4, 32))


@pytest.mark.parametrize("style", ["bert", "llama", "t5"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_attention_as_exported(style: str, *, dynamic: bool) -> None:
    x = torch.randn(2, 6, 32)
    sizes = {0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO} if dynamic else {}
    program = torch.export.export(Attention(style=style).eval(), (x,), dynamic_shapes=[sizes])
    graph_module = program.module()
    assert isinstance(graph_module, GraphModule)
    effects = Effects(graph_module)
    linears = [node for node in iter_nodes(graph_module.graph) if node.target is torch.ops.aten.linear.default]
    assert len(linears) == 4
    assert not any(effects.needs_own_memory(node) for node in linears)
    for node in linears:
        check_by_running(graph_module, node, x)


def test_a_tangle_of_views_ends() -> None:
    def forward(x: Tensor) -> Tensor:
        h = torch.relu(x)
        for _ in range(3000):
            h = h.transpose(0, 1)
        return h.exp()

    graph_module = symbolic_trace(forward)
    effects = Effects(graph_module)
    nodes = list(iter_nodes(graph_module.graph))
    assert not effects.needs_own_memory(nodes[1])
