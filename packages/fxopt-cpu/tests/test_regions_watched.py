"""What a plan must not change: memory of outputs and inputs, sizes that data decide, what is noticed afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from onednn_forms import assert_computes
from region_plans import plans_of
from site_passes import Computes
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_cpu import FuseConvolutions, PackedConv2d, PlanRegions
from fxopt_cpu.library import ISAS, isa
from fxopt_cpu.regions.finding import regions_of
from fxopt_rewrite import infer_shapes

X = (2, 4, 8, 8)
pytestmark = pytest.mark.skipif(isa() not in ISAS[1:], reason="convolutions are planned on processors with AVX2")


class Pair(nn.Module):
    """Two convolutions, with something between them and something beside their result."""

    def __init__(self, between: Callable[[Tensor], Tensor], beside: Callable[[Pair, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.pool = nn.AvgPool2d([2, 2], [2, 2])  # type: ignore[arg-type]  # takes lists, too
        self.scale = nn.Parameter(torch.randn(4))
        self.between, self.beside = between, beside

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        """Return the result, and what is beside it."""
        y = self.between(self.first(x))
        return self.second(y), self.beside(self, x, y)


def rewritten(model: nn.Module, *inputs: Any) -> GraphModule:
    traced = torch.fx.symbolic_trace(model.eval())
    return PlanRegions()(FuseConvolutions()(infer_shapes(traced, *inputs)))


def planned(model: nn.Module, *inputs: Tensor) -> GraphModule:
    """Return a graph module that has run."""
    graph_module = rewritten(model, *inputs)
    with torch.no_grad():
        for _ in range(2):
            graph_module(*inputs)
    return graph_module


class Opaque(nn.Module):
    """Notes what it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        """Return the input."""
        self.seen.append(float(x.sum()))
        return x.clone()


@torch.no_grad()
def test_opaque_modules_and_changing_numbers_stay_outside() -> None:
    def function(m: Any, x: Tensor) -> Any:
        z = torch.relu(m.two(m.opaque(m.one(x))))
        return z * z.mean().item(), z.shape[0], x.view(-1)

    torch.manual_seed(0)
    opaque = Opaque()
    model = Computes(function, one=nn.Conv2d(4, 4, 3), two=nn.Conv2d(4, 4, 3), opaque=opaque).eval()

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Opaque) or super().is_leaf_module(m, module_qualified_name)

    graph_module = PlanRegions()(FuseConvolutions()(GraphModule(model, Tracer().trace(model))))
    for count in range(4):
        x = torch.randn(X)
        found, expected = graph_module(x), model(x)
        torch.testing.assert_close(found[0], expected[0])
        assert found[1] == 2
        assert found[2].data_ptr() == x.data_ptr()
        assert len(opaque.seen) == 2 * (count + 1)  # the graph calls the same module


@torch.no_grad()
def test_writes_to_memory_of_the_region_stay_inside() -> None:
    def function(m: Any, x: Tensor) -> Any:
        y = torch.cat([m.one(x), x], 1)
        half = y[:, :4]
        half.add_(x)
        half.relu_()
        z = m.two(y[:, :4]).add_(x)
        x.mul_(2)
        return z

    model, x = Computes(function, one=nn.Conv2d(4, 4, 1), two=nn.Conv2d(4, 4, 1)).eval(), torch.randn(X)
    graph_module = rewritten(model, x)
    for _ in range(3):
        assert_computes(graph_module, model, x)
    inside = [node.name for region in regions_of(graph_module) for node in region.nodes]
    assert not {"relu_", "mul_"} & {*inside}


@pytest.mark.parametrize("change", ["times one", "plus zero", "weights alone", "parameter"])
@torch.no_grad()
def test_outputs_have_memory_of_their_own(change: str) -> None:
    """What a caller writes into an output is seen nowhere else, as with the model."""
    beside: Callable[[Pair, Tensor, Tensor], object] = {
        "times one": lambda self, x, y: x * 1,
        "plus zero": lambda self, x, y: x + 0,
        "weights alone": lambda self, x, y: self.scale * 2,
        "parameter": lambda self, x, y: self.scale,
    }[change]
    model, x = Pair(F.relu, beside), torch.randn(X)
    graph_module, kept = planned(model, x), x.clone()
    if change == "parameter":
        assert graph_module(x)[1] is graph_module.scale
        return
    first, second = graph_module(x)[1], graph_module(x)[1]
    first.zero_()
    assert torch.equal(x, kept)
    assert torch.equal(second, model(x)[1])
    assert torch.equal(graph_module(x)[1], model(x)[1])


@pytest.mark.parametrize("counts", ["mask", "where", "shape"])
@torch.no_grad()
def test_sizes_that_follow_from_values_are_no_constants(counts: str) -> None:
    """Another input of the same shape has other counts."""
    between: Callable[[Tensor], Tensor] = {
        "mask": lambda y: y * y[y > 0].numel(),
        "where": lambda y: y * torch.where(y > 0)[0].numel(),
        "shape": lambda y: y * y[y > 0].shape[0],
    }[counts]
    model = Pair(between, lambda self, x, y: None).eval()
    graph_module = PlanRegions()(FuseConvolutions()(torch.fx.symbolic_trace(model)))
    for _ in range(3):
        other = torch.randn(X)
        torch.testing.assert_close(graph_module(other)[0], model(other)[0], rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
@pytest.mark.parametrize("fused", [True, False])
def test_a_step_of_training_is_seen(optimizer: type[torch.optim.Optimizer], fused: bool) -> None:
    """Fused optimizers write weights without a trace on the tensors."""
    model, x = Pair(F.relu, lambda self, x, y: None), torch.randn(X)
    graph_module = planned(model, x)
    stepping = optimizer(graph_module.parameters(), lr=0.1, fused=fused)  # type: ignore[call-arg]  # all three take it
    graph_module(x)[0].square().sum().backward()
    stepping.step()
    for _ in range(4):
        with torch.no_grad():
            found = graph_module(x)[0]
        expected = model(x)[0]  # the parameters are the model's own
        torch.testing.assert_close(found, expected.detach(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("change", ["strides", "forgotten", "list", "class"])
@torch.no_grad()
def test_changes_that_leave_no_version_are_seen(change: str) -> None:
    model, x = Pair(lambda y: y, lambda self, x, y: self.pool(y)), torch.randn(X)
    graph_module = planned(model, x)
    assert plans_of(graph_module)
    packed = [module for module in graph_module.modules() if isinstance(module, PackedConv2d)]
    pool = graph_module.get_submodule("pool")
    if change == "strides":
        packed[0].weight.data = packed[0].weight.data.transpose(0, 1)
    elif change == "forgotten":
        packed[0].weight.data.mul_(2)
        packed[0].forget_derived()
    elif change == "list":
        pool.kernel_size[0] = pool.stride[0] = 1  # type: ignore[operator]
    else:
        pool.__class__ = nn.MaxPool2d
        pool.dilation, pool.return_indices = 1, False  # type: ignore[assignment]
    expected = torch.fx.Interpreter(graph_module).run(x)
    for _ in range(4):
        found = graph_module(x)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_minus_zero_is_another_number() -> None:
    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor, by: float) -> Tensor:
            """Return a quotient."""
            return torch.div(self.second(self.first(x)), by)

    x = torch.randn(X)
    graph_module = rewritten(Divided(), x, 1.0)
    for _ in range(4):
        graph_module(x, 0.0)
    assert torch.equal(graph_module(x, -0.0), -graph_module(x, 0.0))
