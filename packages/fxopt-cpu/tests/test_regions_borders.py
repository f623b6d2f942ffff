"""Regions: where they end, and when the layers run although there could be a program."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from onednn_forms import assert_computes
from region_models import Net, X, prepared
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_cpu import Activation, FuseConvolutions, FuseRegions, PackedConv2d
from fxopt_cpu.programs import programs
from fxopt_cpu.programs.dispatch import programs_of
from fxopt_cpu.programs.fusible import regions_of


@pytest.fixture(autouse=True)
def programs_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no clock decide in a test."""
    monkeypatch.setattr(programs._Attempt, "_fastest", lambda self, programs: programs[0] if programs else None)


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
    class Broken(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two, self.opaque = nn.Conv2d(3, 4, 3), nn.Conv2d(4, 4, 3), Opaque()

        def forward(self, x: Tensor) -> tuple[Tensor, Any, Tensor]:
            y = self.opaque(self.one(x))
            z = torch.relu(self.two(y))
            return z * z.mean().item(), z.shape[0], x.view(-1)

    torch.manual_seed(0)
    model, x = Broken().eval(), torch.randn(X)

    class Tracer(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return isinstance(m, Opaque) or super().is_leaf_module(m, module_qualified_name)

    graph_module = FuseRegions()(FuseConvolutions()(GraphModule(model, Tracer().trace(model))))
    for count in range(4):
        x = torch.randn(X)
        found, expected = graph_module(x), model(x)
        torch.testing.assert_close(found[0], expected[0])
        assert found[1] == 2
        assert found[2].data_ptr() == x.data_ptr()
        assert len(model.opaque.seen) == 2 * (count + 1)  # the graph calls the same module
    assert len(programs_of(graph_module)) == 2


@torch.no_grad()
def test_memory_formats_of_outputs_are_those_of_the_layers() -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(X)
    graph_module = prepared(model, x)
    for each in (x, x.contiguous(memory_format=torch.channels_last)):
        stride = graph_module(each).stride()
        for _ in range(4):
            assert graph_module(each).stride() == stride
    assert len(programs_of(graph_module)) == 2


def test_what_was_prepared_in_inference_mode_has_programs_as_well() -> None:
    with torch.inference_mode():
        model, x = Net().eval(), torch.randn(X)
        graph_module = prepared(model, x)
        for count in (0, 1, 1):
            assert_computes(graph_module, model, x)
            assert len(programs_of(graph_module)) == count
    assert not any(parameter.is_inference() for parameter in graph_module.parameters())


@torch.no_grad()
def test_writes_to_memory_of_the_region_stay_inside() -> None:
    class Writing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.two = nn.Conv2d(3, 4, 1), nn.Conv2d(4, 3, 1)

        def forward(self, x: Tensor) -> Tensor:
            y = torch.cat([self.one(x), x], 1)
            half = y[:, :3]
            half.add_(x)
            half.relu_()
            z: Tensor = self.two(y[:, :4]).add_(x)
            x.mul_(2)
            return z

    model, x = Writing().eval(), torch.randn(X)
    graph_module = prepared(model, x)
    for count in (0, 1, 1):
        assert_computes(graph_module, model, x)
        assert len(programs_of(graph_module)) == count
    inside = [node.name for region in regions_of(graph_module) for node in region.nodes]
    assert "relu_" in inside
    assert "mul_" not in inside


@torch.no_grad()
def test_linear_layers_between_residual_sums_are_no_region() -> None:
    class Residual(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            for layer in self.layers:
                x = x + layer(x)
            return x

    model, x = Residual().eval(), torch.randn(2, 4)
    graph_module = prepared(model, x)
    assert not list(regions_of(graph_module))
    assert_computes(graph_module, model, x)


@pytest.mark.parametrize("fails", ["traced", "wrong", "slower", "missing"])
@torch.no_grad()
def test_without_a_program_that_is_right_and_faster_the_layers_run(fails: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def trace(*args: Any, **options: Any) -> None:
        raise RuntimeError("TorchScript is not there")

    if fails == "traced":
        monkeypatch.setattr(torch._C, "_create_graph_by_tracing", trace)
    elif fails == "wrong":
        by_torch = PackedConv2d.by_torch
        monkeypatch.setattr(PackedConv2d, "by_torch", lambda self: lambda x, *other: by_torch(self)(x, *other) * 1.01)
    elif fails == "slower":
        monkeypatch.setattr(programs._Attempt, "_fastest", lambda self, programs: None)
    else:
        monkeypatch.delattr(torch._C, "_jit_set_llga_enabled")
    model, x = Net().eval(), torch.randn(X)
    graph_module = prepared(model, x)
    for _ in range(6):
        assert_computes(graph_module, model, x)
    assert not programs_of(graph_module)


@pytest.mark.parametrize("padding", [((0, 1), (1, 2)), ((2, 0), (0, 0)), ((0, 2), (2, 0)), ((1, 1), (0, 3))])
@pytest.mark.parametrize("dilation", [(1, 1), (2, 1)])
@pytest.mark.parametrize("groups", [1, 4])
@torch.no_grad()
def test_uneven_padding_by_zeros_in_the_kernel(
    padding: tuple[tuple[int, int], tuple[int, int]], dilation: tuple[int, int], groups: int
) -> None:
    conv = PackedConv2d(
        4, 8, (3, 2), stride=(2, 1), padding=padding, dilation=dilation, groups=groups, activation=Activation("relu")
    )
    for parameter in conv.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(2, 4, 9, 8)
    torch.testing.assert_close(conv.by_torch()(x), conv(x))
