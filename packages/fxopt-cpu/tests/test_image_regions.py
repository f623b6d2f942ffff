"""Convolutional models run as plans: convolutions, pools, sums, gates and activations in one call."""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from region_plans import plans_of
from site_passes import Computes
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter
from torch.utils._pytree import tree_leaves

from fxopt_capture import capture
from fxopt_core import registry
from fxopt_cpu import PackedConv2d
from fxopt_cpu.library import ISAS, isa
from fxopt_cpu.regions.finding import regions_of
from fxopt_rewrite import infer_shapes

pytest.importorskip("fxopt_cpu")
pytestmark = pytest.mark.skipif(isa() not in ISAS[1:], reason="convolutions are planned on processors with AVX2")

Make = Callable[[nn.Module, Tensor], GraphModule]
PACKED = "fold-batch-norm,fuse-convolutions,plan-regions"


class Block(nn.Module):
    """A stem, an inverted bottleneck with a gate, a residual sum, and a head."""

    def __init__(self, groups: int = 24) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.wide, self.deep = nn.Conv2d(8, 24, 1), nn.Conv2d(24, 24, 3, padding=1, groups=groups)
        self.squeeze, self.excite, self.narrow = nn.Conv2d(24, 6, 1), nn.Conv2d(6, 24, 1), nn.Conv2d(24, 8, 1)
        self.pool, self.head = nn.MaxPool2d(3, 2, 1), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Any:
        """Return the scores."""
        x = self.pool(F.relu6(self.norm(self.stem(x))))
        y = F.hardswish(self.deep(F.silu(self.wide(x))))
        y = y * F.hardsigmoid(self.excite(F.relu(self.squeeze(y.mean((2, 3), keepdim=True)))))
        x = x + self.narrow(y)
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def planned(model: nn.Module, x: Tensor) -> GraphModule:
    return registry().pipeline(PACKED)(capture(model, (x,)))


def traced(model: nn.Module, x: Tensor) -> GraphModule:
    """What `planned` makes, from a graph that costs less; `test_region_forms` has each call in both forms."""
    return registry().pipeline(PACKED)(infer_shapes(torch.fx.symbolic_trace(model), x))


@torch.no_grad()
@pytest.mark.parametrize(("groups", "made"), [(24, planned), (2, traced), (4, traced), (12, traced)])
def test_a_model_with_every_kind_of_step_is_one_plan(groups: int, made: Make) -> None:
    model = Block(groups).eval()
    graph_module = made(copy.deepcopy(model), torch.randn(2, 3, 32, 32))
    gc.collect()
    for size in ((2, 3, 32, 32), (1, 3, 32, 32), (3, 3, 32, 32)):
        x = torch.randn(*size)
        for each in (x, x.contiguous(memory_format=torch.channels_last)):
            for _ in range(3):
                torch.testing.assert_close(graph_module(each), model(each), rtol=1e-4, atol=1e-5)
    assert len(plans_of(graph_module)) == 6
    x[0, 0, 3, 3] = torch.nan
    torch.testing.assert_close(graph_module(x), model(x), rtol=1e-4, atol=1e-5, equal_nan=True)
    layer = next(module for name, module in graph_module.named_modules() if name.endswith("deep_packed"))
    assert isinstance(layer, PackedConv2d) and layer.holder.frozen
    assert torch.equal(layer.weight, model.deep.weight)


@torch.no_grad()
def test_an_activation_in_place_after_an_operation_is_planned_and_of_an_input_is_not() -> None:
    def function(m: Any, x: Tensor) -> Any:
        y, z = F.silu(m.first(x)), F.silu(m.second(x))
        return m.third(F.relu_(y * z)) + F.relu_(x).mean()

    x = torch.randn(2, 3, 8, 8)
    layers = {"first": nn.Conv2d(3, 8, 1), "second": nn.Conv2d(3, 8, 1), "third": nn.Conv2d(8, 4, 1)}
    model = Computes(function, **layers).eval()
    graph_module, given = planned(model, x.clone()), x.clone()
    torch.testing.assert_close(graph_module(given), model(x), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(given, x)  # both were written to
    (region,) = regions_of(graph_module)
    inside = [node.name for node in region.nodes]
    assert len(plans_of(graph_module)) == 1 and "relu_" in inside and "relu__1" not in inside


@torch.no_grad()
@pytest.mark.parametrize("read", [lambda y: y.stride(1), lambda y: y.is_contiguous() + 1])
def test_a_plan_reads_no_strides(read: Callable[[Any], int]) -> None:
    """Its values have other ones than those of the nodes."""
    layers = {name: nn.Conv2d(4, 4, 1) for name in ("first", "second", "third")}
    model = Computes(lambda m, x: m.third(m.second(y := m.first(x)) * read(y)), **layers).eval()
    graph_module, x = traced(model, torch.randn(2, 4, 8, 8)), torch.randn(2, 4, 8, 8)
    torch.testing.assert_close(graph_module(x), model(x), rtol=1e-4, atol=1e-4)
    assert plans_of(graph_module)


class Branches(nn.Module):
    """Batch norms that no convolution takes in: of a sum, and of a value that others read, too."""

    def __init__(self, *, affine: bool = True) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.first, self.second = nn.BatchNorm2d(8, affine=affine), nn.BatchNorm2d(8, affine=affine)
        for norm in (self.first, self.second):
            nn.init.normal_(norm.get_buffer("running_mean"))
            nn.init.uniform_(norm.get_buffer("running_var"), 0.5, 2)

    def forward(self, x: Tensor) -> Any:
        """Return images of the same size."""
        y = F.relu(self.one(x))
        z = self.two(y)
        z += self.first(y)
        return self.second(F.relu_(z) + y)


class Shared(nn.Module):
    """A head that is called for two scales, and transposed convolutions."""

    def __init__(self, *, bias: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.up, self.last = nn.ConvTranspose2d(12, 8, (2, 3), (2, 3), bias=bias), nn.Conv2d(8, 5, 1, bias=bias)
        self.head = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=bias), nn.BatchNorm2d(8), nn.ReLU())
        nn.init.normal_(self.head[1].get_buffer("running_mean"))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return images of two sizes."""
        x = self.first(x)
        return self.last(self.head(x)), self.head(self.up(F.relu(self.second(x))))


STATISTICS = ["second.running_mean", "second.running_var"]
OF_SHARED = ["up.weight", "head.0.weight", "head.1.weight"]
WHOLE: list[tuple[nn.Module, list[str]]] = [
    (Branches(), [*STATISTICS, "second.weight", "second.bias"]),
    (Shared(), [*OF_SHARED, "up.bias", "head.0.bias"]),
]
BARE: list[tuple[nn.Module, list[str]]] = [(Branches(affine=False), STATISTICS), (Shared(bias=False), OF_SHARED)]


@torch.no_grad()
@pytest.mark.parametrize(
    ("made", "model", "names"), [*((planned, *each) for each in WHOLE), *((traced, *each) for each in (*WHOLE, *BARE))]
)
def test_layers_of_torch_are_planned_and_their_changes_seen(made: Make, model: nn.Module, names: list[str]) -> None:
    model, x = copy.deepcopy(model).eval(), torch.randn(2, 3, 8, 8)
    graph_module = made(model, x)
    assert len(list(regions_of(graph_module))) == 1

    def agree(*inputs: Tensor) -> None:
        for each in inputs:
            wanted = [tree_leaves(run(each)) for run in (model, Interpreter(graph_module).run)]
            for _ in range(2):
                for found, eager, by_nodes in zip(tree_leaves(graph_module(each)), *wanted, strict=True):
                    torch.testing.assert_close(found, eager, rtol=1e-4, atol=1e-5, equal_nan=True)
                    assert found.stride() == by_nodes.stride()

    agree(x, x.contiguous(memory_format=torch.channels_last), x[:1], torch.randn(1, 3, 9, 11))
    plans = plans_of(graph_module)
    assert len(plans) == 4
    assert len({id(weight) for plan in plans for weight in plan.weights}) == len(plans[0].weights)
    for name in names:
        held = [{**dict(each.named_parameters()), **dict(each.named_buffers())}[name] for each in (model, graph_module)]
        for tensor in held:
            tensor.mul_(2)
        agree(x)
        for tensor in held:
            tensor.data = tensor.data / 3
        agree(x)
    x[0, 0, 3, 3] = torch.nan
    agree(x)


class Pyramid(nn.Module):
    """Images of two scales, enlarged, concatenated and summed in place."""

    def __init__(self, mode: str = "nearest") -> None:
        super().__init__()
        self.fine, self.coarse = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 12, 3, stride=2, padding=1)
        self.both, self.side = nn.Conv2d(20, 8, 3, padding=1), nn.Conv2d(12, 8, 1)
        self.mode, self.twice = mode, nn.Upsample(scale_factor=2)

    def forward(self, x: Tensor) -> Any:
        """Return images of twice the size."""
        fine = F.relu(self.fine(x))
        coarse = F.relu(self.coarse(fine))
        up = F.interpolate(coarse, size=fine.shape[-2:], mode=self.mode)
        y = self.both(torch.cat((up, fine), 1))
        y += F.interpolate(self.side(coarse), size=fine.shape[-2:], mode=self.mode)
        return self.twice(y.relu_())


@torch.no_grad()
@pytest.mark.parametrize(("mode", "made"), [("nearest", planned), ("nearest-exact", traced)])
def test_enlarged_and_concatenated_images_are_planned(mode: str, made: Make) -> None:
    model = Pyramid(mode).eval()
    graph_module = made(model, torch.randn(2, 3, 16, 16))
    assert len(list(regions_of(graph_module))) == 1
    for size in ((2, 3, 16, 16), (1, 3, 17, 23), (1, 3, 33, 9), (1, 3, 101, 3)):  # some are no multiples
        x = torch.randn(*size)
        for each in (x, x.contiguous(memory_format=torch.channels_last)):
            found, wanted = graph_module(each), model(each)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert len(plans_of(graph_module)) == 8


@torch.no_grad()
@pytest.mark.parametrize("named", [False, True])
def test_images_are_enlarged_whichever_way_they_are_given(named: bool) -> None:
    def function(m: Any, x: Tensor) -> Any:
        y = m.two(m.up(input=m.one(x)) if named else m.up(m.one(x)))
        size = (y.shape[2] * 2, y.shape[3])
        y = F.interpolate(size=size, input=y) if named else F.interpolate(y, size)
        return m.norm(m.three(y) + x.mean())

    layers = {"one": nn.Conv2d(1, 4, 1), "two": nn.Conv2d(4, 4, 1), "three": nn.Conv2d(4, 1, 1)}
    model = Computes(function, **layers, up=nn.Upsample(scale_factor=3), norm=nn.BatchNorm2d(1)).eval()
    x = torch.randn(2, 1, 5, 7)
    graph_module = traced(model, x)
    for each in (x, torch.randn(1, 1, 4, 4), torch.randn(0, 1, 5, 7)):
        for _ in range(2):
            torch.testing.assert_close(graph_module(each), model(each), rtol=1e-4, atol=1e-5, equal_nan=True)


@torch.no_grad()
def test_sums_in_place_that_torch_refuses_are_refused() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor, other: Tensor) -> Any:
            y = F.avg_pool2d(self.one(x), 1)
            return self.two(y.add_(other))

    x, one = torch.randn(1, 4, 3, 3), torch.randn(1, 4, 3, 3)
    graph_module = registry().pipeline(PACKED)(infer_shapes(torch.fx.symbolic_trace(Sum().eval()), x, one))
    graph_module(x, one)
    with pytest.raises(RuntimeError, match="shape"):
        graph_module(x, torch.randn(2, 4, 3, 3))


@torch.no_grad()
def test_images_that_are_enlarged_by_means_are_not_planned() -> None:
    model, x = Pyramid("bilinear").eval(), torch.randn(1, 3, 16, 16)
    graph_module = traced(model, x)
    torch.testing.assert_close(graph_module(x), model(x), rtol=1e-4, atol=1e-5)
    by_means = {node.name for node in graph_module.graph.nodes if node.target is F.interpolate}
    regions = [{node.name for node in region.nodes} for region in regions_of(graph_module)]
    assert regions and len(by_means) == 2
    assert not any(by_means & names for names in regions)


@torch.no_grad()
def test_concatenations_are_planned_by_all_names_of_their_dimension_and_not_into_a_tensor() -> None:
    def function(m: Any, x: Tensor) -> Any:
        y = m.two(torch.cat((x, m.one(x)), axis=1))  # type: ignore[call-arg]  # NumPy's name
        z = m.three(torch.cat(tensors=[y, x], dim=-3))
        return m.four(torch.cat([z, z], out=m.memory))

    layers = {"one": nn.Conv2d(3, 3, 1), "two": nn.Conv2d(6, 3, 1), "three": nn.Conv2d(6, 3, 1)}
    model, x = Computes(function, **layers, four=nn.Conv2d(3, 3, 1)).eval(), torch.randn(2, 3, 8, 8)
    model.memory = torch.zeros(0)
    graph_module = traced(model, x)
    wanted = model(x)
    for _ in range(2):
        torch.testing.assert_close(graph_module(x), wanted, rtol=1e-4, atol=1e-5)
    regions = [{node.name for node in region.nodes} for region in regions_of(graph_module)]
    assert regions == [{"cat", "cat_1", "one_packed", "two_packed", "three_packed"}]


@torch.no_grad()
def test_sums_in_place_are_planned_where_nobody_else_reads_the_summand() -> None:
    def function(m: Any, x: Tensor) -> Any:
        y = F.avg_pool2d(m.one(x), 3, 1, 1)
        y += x
        z = m.two(y)
        first = z[:1]
        z.mul_(2)  # which is read through `first`, too
        return m.three(z) * first, y

    layers = {name: nn.Conv2d(4, 4, 3, padding=1) for name in ("one", "two", "three")}
    model, x = Computes(function, **layers).eval(), torch.randn(1, 4, 8, 8)
    graph_module = planned(model, x)
    regions = [{node.name for node in region.nodes} for region in regions_of(graph_module)]
    for found, wanted in zip(graph_module(x), model(x), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert regions == [{"one_packed", "avg_pool2d", "add_", "two_packed"}]


def test_modules_of_traces_are_in_regions_as_functions_are() -> None:
    layers = [nn.Conv2d(3, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(16, 16, 3), nn.AdaptiveAvgPool2d(1)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(16, 8), nn.GELU(), nn.Linear(8, 4)).eval()
    x = torch.randn(2, 3, 20, 20)
    for graph_module in (capture(model, x), infer_shapes(torch.fx.symbolic_trace(model), x)):
        optimized = registry().pipeline("cpu-inference")(graph_module)
        (region,) = regions_of(optimized)
        assert len([node for node in region.nodes if "packed" in node.name or "panels" in node.name]) == 4
        with torch.no_grad():
            for rows in (2, 3, 1):
                x = torch.randn(rows, 3, 20, 20)
                torch.testing.assert_close(optimized(x), model(x))


@torch.no_grad()
@pytest.mark.parametrize("example", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("weights", [torch.contiguous_format, torch.channels_last])
def test_each_call_has_the_strides_of_eager_and_the_bits_of_the_first(
    weights: torch.memory_format, example: torch.memory_format
) -> None:
    def function(m: Any, x: Tensor) -> Any:
        y = m.one(x)
        z = F.relu(y)
        return y, m.other(z), z.flatten(2).transpose(1, 2), F.max_pool2d(z, 2)

    model = Computes(function, one=nn.Conv2d(3, 8, 3, padding=1), other=nn.Conv2d(8, 1, 1)).eval()
    model.to(memory_format=weights)  # type: ignore[call-overload]  # torch declares none with a format alone
    graph_module = planned(model, torch.randn(2, 3, 8, 8).to(memory_format=example))
    for rows in (2, 1):
        x = torch.randn(rows, 3, 8, 10).to(memory_format=example)
        wanted, first = model(x), graph_module(x)
        for _ in range(3):
            found = graph_module(x)
            assert [each.stride() for each in found] == [each.stride() for each in wanted]
            torch.testing.assert_close(found, first, rtol=0, atol=0)
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


class Drawn(nn.Module):
    """Convolutions, pools, parts and concatenations of drawn values, each of which may be read several times."""

    def __init__(self, seed: int, steps: int = 9) -> None:
        super().__init__()
        draw = random.Random(seed)
        self.first = nn.Conv2d(3, 8, 3, padding=1)
        self.layers, self.program = nn.ModuleList(), []
        sizes = [8]
        for _ in range(steps):
            kind = draw.choice(["conv", "deep", "pool", "cat", "cat", "part", "up", "sum", "norm"])
            read = [draw.randrange(len(sizes)) for _ in range(draw.randint(2, 3) if kind == "cat" else 1)]
            size, layer = sizes[read[0]], None
            if kind == "conv":
                size, layer = draw.choice([4, 8, 17]), nn.Conv2d(size, draw.choice([4, 8, 17]), 3, padding=1)
                size = layer.out_channels
            elif kind == "deep":
                layer = nn.Conv2d(size, size, 3, padding=1, groups=size)
            elif kind == "cat":
                size = sum(sizes[each] for each in read)
            elif kind == "part":
                size = size // 2
            self.layers.append(layer or nn.Identity())
            self.program.append((kind, read, sizes[read[0]]))
            sizes.append(size)
        self.last = nn.Conv2d(sum(sizes), 5, 1)

    def forward(self, x: Tensor) -> Any:
        """Return images of five channels."""
        values = [self.first(x)]
        for (kind, read, channels), layer in zip(self.program, self.layers, strict=True):
            given = [values[each] for each in read]
            if kind == "cat":
                values.append(torch.cat(given, 1))
            elif kind == "part":
                values.append(given[0].chunk(2, 1)[0] if channels % 2 == 0 else given[0][:, 1::2])
            elif kind == "pool":
                values.append(F.max_pool2d(given[0], 3, 1, 1))
            elif kind == "up":
                values.append(F.interpolate(F.max_pool2d(given[0], 2), scale_factor=2.0))
            elif kind == "norm":
                norm = F.group_norm(given[0], 1 if channels % 4 else 4)
                values.append(norm if read[0] % 2 else F.silu(norm))
            elif kind == "sum":
                values.append(given[0] + given[0].mean((2, 3), keepdim=True))
            else:
                values.append(F.relu(layer(given[0])))
        return self.last(torch.cat(values, 1))


@torch.no_grad()
@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=() if seed < 8 else pytest.mark.nightly) for seed in range(24)]
)
def test_values_may_lie_within_concatenations_whoever_else_reads_them(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = Drawn(seed).eval(), torch.randn(2, 3, 8, 6)
    graph_module = traced(model, x)
    expected = model(x)
    for _ in range(2):
        torch.testing.assert_close(graph_module(x), expected, rtol=1e-4, atol=1e-4)
    assert plans_of(graph_module)


@torch.no_grad()
def test_concatenations_of_results_copy_nothing() -> None:
    def function(m: Any, x: Tensor) -> Any:
        for layer in m.layers:
            x = torch.cat((x, F.relu(layer(x))), 1)
        return x

    layers = nn.ModuleList(nn.Conv2d(8 * (place + 1), 8, 3, padding=1) for place in range(4))
    model = nn.Sequential(nn.Conv2d(3, 8, 1), Computes(function, layers=layers), nn.Conv2d(40, 3, 1)).eval()
    x = torch.randn(1, 3, 8, 8)
    graph_module = traced(model, x)
    torch.testing.assert_close(graph_module(x), model(x), rtol=1e-4, atol=1e-5)
    (plan,) = plans_of(graph_module)
    assert plan.arena == (40 + 3) * 64 * 4  # the widest concatenation, in which all others lie, and the result


@torch.no_grad()
def test_parts_of_single_pixels_are_concatenated_in_their_order() -> None:
    def function(m: Any, x: Tensor) -> Any:
        parts = F.adaptive_avg_pool2d(F.relu(m.first(x)), 1).permute(0, 2, 3, 1).chunk(2, -1)
        return m.last(torch.cat(parts[::-1], -1).permute(0, 3, 1, 2))

    model = Computes(function, first=nn.Conv2d(8, 16, 3, padding=1), last=nn.Conv2d(16, 8, 1)).eval()
    x = torch.randn(2, 8, 5, 5)
    graph_module = planned(model, x)
    for each in (x, x[:1]):
        torch.testing.assert_close(graph_module(each), model(each), rtol=1e-4, atol=1e-5)
    assert len(plans_of(graph_module)) == 2
