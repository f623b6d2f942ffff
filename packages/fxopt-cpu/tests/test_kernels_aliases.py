"""Values that share memory with others, in regions and in what is fused: writes reach all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from region_plans import plans_of
from site_passes import Computes
from torch import Tensor, nn

from fxopt_core import registry
from fxopt_cpu import FuseLinears, PlanRegions, isa
from fxopt_cpu.library import ISAS
from fxopt_rewrite import infer_shapes
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import graph_of

pytestmark = pytest.mark.skipif(isa() is None, reason="the library was not built")


def with_layers(function: Callable[..., Any]) -> nn.Module:
    layers = {"one": nn.Linear(16, 16), "two": nn.Linear(16, 16), "other": nn.Linear(8, 16)}
    return Computes(function, **layers).eval()


def _input_through_a_view(model: Any, x: Tensor) -> Any:
    y = model.one(x)
    view = x.view(-1, 16)
    z = model.two(y)
    view.add_(1)
    return z, x


def _view_of_a_result(model: Any, x: Tensor) -> Any:
    y = model.one(x)
    view = y.view(-1, 16)
    z = model.two(y)
    y.add_(1)
    return z, view


def _no_copy(model: Any, x: Tensor) -> Any:
    y = model.one(x)
    same, cast = x.contiguous(), y.to(torch.float32)
    z = model.two(y)
    same.add_(1)
    cast.mul_(2)
    return z, x, y


def _bits(model: Any, x: Tensor) -> Any:
    y = model.one(x)
    bits = y.view(torch.int32)
    return model.two(y), bits >> 31


def _parts(model: Any, x: Tensor) -> Any:
    parts = model.one(x).split([8, 8], -1)
    first, second = parts[0], parts[1]
    return model.other(first) * second.sum()


@pytest.mark.parametrize("computes", [_input_through_a_view, _view_of_a_result, _no_copy, _bits, _parts])
@torch.no_grad()
def test_a_region_computes_what_its_nodes_do(computes: Callable[..., Any]) -> None:
    torch.manual_seed(0)
    model, x = with_layers(computes), torch.randn(2, 5, 16)
    graph_module = PlanRegions()(FuseLinears()(torch.export.export(model, (x,)).module()))
    for _ in range(3):
        mine, its = x.clone(), x.clone()
        torch.testing.assert_close(graph_module(mine), model(its))
        torch.testing.assert_close(mine, its)
    assert computes is not _parts or len(plans_of(graph_module)) == 1


def _views(m: Any, x: Tensor) -> Any:
    """Every kind of view of a result that leaves the region, and of one that stays in it."""
    y, inside = F.relu(m.one(x)), m.two(x).add_(x)
    parts, rows = y.chunk(2, 1), inside.split([2, 4], 2)
    made = y[:, ::2], y.narrow(2, 1, 3), y.select(1, 0)[None].expand(3, -1, -1, -1), parts[1], y.mT, y.flatten(2)
    more = rows[1].unbind(3)[0], inside.permute(2, 0, 1, 3), inside.mT.reshape(-1), y.contiguous()
    given = x[:, 1], x.contiguous(), m.scale, m.scale[1:]
    return (m.two(y * m.scale), y, *made, *more, *given)


@torch.no_grad()
@pytest.mark.skipif(isa() not in ISAS[1:], reason="convolutions are planned on processors with AVX2")
@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("form", ["modules", "export"])
def test_views_that_leave_a_region_share_the_memory_of_eager(form: Form, layout: torch.memory_format) -> None:
    layers = {"one": nn.Conv2d(4, 4, 3, padding=1), "two": nn.Conv2d(4, 4, 1)}
    model, x = Computes(_views, **layers).eval(), torch.randn(2, 4, 6, 5).to(memory_format=layout)
    model.scale = nn.Parameter(torch.rand(4, 1, 1))
    graph_module = registry().pipeline("fuse-convolutions,plan-regions")(graph_of(model, form, x))
    for _ in range(2):
        found, expected = graph_module(x), model(x)
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
        assert _places(x, model.scale, *found) == _places(x, model.scale, *expected)
    assert len(plans_of(graph_module)) == 1


def _places(*tensors: Tensor) -> list[tuple[object, ...]]:
    """Return the strides of tensors, and where they lie in the first one that they share memory with."""
    storages = [each.untyped_storage().data_ptr() for each in tensors]
    held = zip(tensors, storages, strict=True)
    return [(storages.index(place), each.storage_offset(), each.stride()) for each, place in held]


@torch.no_grad()
def test_a_value_that_is_scaled_in_place_is_no_quick_gelu() -> None:
    def scaled(model: Any, x: Tensor) -> Tensor:
        y: Tensor = model.one(x)
        gate = torch.sigmoid(y.mul_(1.702))
        return y * gate

    model, x = with_layers(scaled), torch.randn(4, 16)
    torch.testing.assert_close(FuseLinears()(torch.fx.symbolic_trace(model))(x), model(x))


@torch.no_grad()
def test_what_reads_a_value_that_identity_passes_on_sees_the_activation_in_place() -> None:
    def function(m: Any, x: Tensor) -> Any:
        y = m.one(x)
        z = F.relu(m.same(y), inplace=True)
        return m.other(z), m.other(y), y

    layers = {"one": nn.Conv2d(3, 8, 3), "other": nn.Conv2d(8, 8, 1), "same": nn.Identity()}
    model, x = Computes(function, **layers).eval(), torch.randn(1, 3, 9, 9)
    traced = infer_shapes(torch.fx.symbolic_trace(model), x)
    graph_module = registry().pipeline("fuse-convolutions,plan-regions")(traced)
    for _ in range(3):
        torch.testing.assert_close(graph_module(x), model(x), atol=1e-5, rtol=1e-4)


@torch.no_grad()
def test_long_chains_in_place_take_linear_time(steps_of: Callable[[Callable[[], object]], int]) -> None:
    def planned(count: int) -> int:
        def function(m: Any, x: Tensor) -> Any:
            y = m.one(x)
            for _ in range(count):
                y = y.add_(x)
            return m.two(y)

        model, x = with_layers(function), torch.ones(2, 16)
        graph_module = FuseLinears()(infer_shapes(torch.fx.symbolic_trace(model), x))
        steps = steps_of(lambda: PlanRegions()(graph_module))
        torch.testing.assert_close(graph_module(x), model(x))
        return steps

    planned(1)  # what is computed once
    assert planned(160) < 2.5 * planned(80)
