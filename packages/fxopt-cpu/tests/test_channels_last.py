"""`ConvertToChannelsLast`: where regions begin and end, and what may not be converted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from onednn_forms import check, operations
from test_pack_convolutions import Computes
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_core import history, iter_nodes
from fxopt_cpu import ConvertToChannelsLast, PackConvolutions
from fxopt_rewrite.shapes.infer import infer_shapes
from fxopt_testing.rewrites import graph_of, refused

X = torch.randn(2, 3, 8, 8)
OTHERS = [(torch.randn(5, 3, 8, 8),), (torch.randn(0, 3, 8, 8),), (torch.randn(1, 3, 8, 8),)]


def layers() -> dict[str, nn.Module]:
    """Convolutions that keep the size of their images."""
    return {name: nn.Conv2d(3, 3, 3, padding=1) for name in ("a", "b", "c", "d")}


def conversions(graph_module: GraphModule) -> list[str]:
    """What is converted, and to which format: "x -> last"."""
    found = []
    for node in iter_nodes(graph_module.graph):
        if "contiguous" in node.name and "memory_format" in node.kwargs:
            last = node.kwargs["memory_format"] is torch.channels_last
            found.append(f"{str(node.args[0]).rstrip('_0123456789')} -> {'last' if last else 'first'}")
    return found


CASES: dict[str, tuple[Callable[[Any, Tensor], Any], int]] = {
    "chain": (lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x))))), 2),
    "pooled": (lambda m, x: F.adaptive_avg_pool2d(m.b(m.a(x)), 1).flatten(1), 2),
    "mean": (lambda m, x: m.b(m.a(x)).mean((2, 3)), 2),
    "residual": (lambda m, x: (lambda y: m.c(y + m.b(y)))(m.a(x)), 2),
    "residual of the input": (lambda m, x: m.b(x + m.a(x)), 2),
    "branches": (lambda m, x: torch.cat([m.a(x), m.b(x), m.c(x)], 1), 2),
    "two results": (lambda m, x: (lambda y: (m.c(m.b(y)), F.relu(y)))(m.a(x)), 3),
    "returned and read": (lambda m, x: (lambda y: (y, m.c(m.b(F.relu(y)))))(m.a(x)), 3),
    "padded": (lambda m, x: m.b(m.a(F.pad(x, (1, 1, 1, 1)))), 2),
    "viewed": (lambda m, x: m.c(m.b(m.a(x)).view(-1, 3, 4, 16)) + m.d(x).view(-1, 3, 4, 16), 4),
    "reshaped": (lambda m, x: m.b(m.a(x)).reshape(-1, 192) @ torch.ones(192, 2), 2),
    "in place": (lambda m, x: m.b(m.a(x).relu_().add_(x)), 2),
    # Three numbers that are nearly the same have next to no variance, by which rounding would be divided.
    "permuted": (lambda m, x: F.layer_norm(m.b(m.a(x)).permute(0, 2, 3, 1), (3,), eps=0.1).permute(0, 3, 1, 2), 1),
    "permuted and returned": (lambda m, x: m.b(m.a(x)).permute(0, 2, 3, 1), 2),
    "chunks": (lambda m, x: (lambda y: m.c(y[0] * y[1] + y[2]))(m.b(m.a(x)).repeat(1, 3, 1, 1).chunk(3, 1)), 4),
    "attention": (lambda m, x: (lambda y: m.b(y * torch.sigmoid(m.c(y.mean((2, 3), keepdim=True)))))(m.a(x)), 2),
    "sizes": (lambda m, x: (lambda y: F.interpolate(m.b(y), size=(y.shape[2], 4)))(m.a(x)), 2),
}


@pytest.mark.parametrize("case", CASES)
def test_a_region_is_converted_as_a_whole(case: str) -> None:
    function, count = CASES[case]
    found = check(ConvertToChannelsLast(), Computes(function, **layers()), X, sites=1, others=OTHERS)
    assert len(conversions(found)) <= count, found.code


@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_results_are_laid_out_as_before(case: str) -> None:
    model = Computes(CASES[case][0], **layers())
    graph_module = ConvertToChannelsLast()(graph_of(model, "export-dynamic", X))
    for converted in (graph_module, PackConvolutions()(graph_module)):
        found, expected = converted(X), model(X)
        for one, other in zip(*((t,) if isinstance(t, Tensor) else t for t in (found, expected)), strict=True):
            assert one.stride() == other.stride()
            torch.testing.assert_close(one, other)


@torch.no_grad()
def test_every_convolution_of_a_region_reads_channels_last() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 8, 1), nn.SiLU(),
        nn.Conv2d(8, 4, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 2),
    ).eval()  # fmt: skip
    graph_module = ConvertToChannelsLast()(infer_shapes(torch.fx.symbolic_trace(model), X), expect=1)
    assert conversions(graph_module) == ["input -> last"]
    formats = []
    for module in graph_module.modules():
        if isinstance(module, nn.Conv2d):
            module.register_forward_pre_hook(
                lambda module, args: formats.append(args[0].is_contiguous(memory_format=torch.channels_last))
            )
    graph_module(X)
    assert formats == [True] * 3


WRITTEN: dict[str, Callable[[Any, Tensor], Any]] = {
    "through a view": lambda m, x: (lambda y, v: (v.add_(1), m.c(m.b(y))))(y := m.a(x), y.flatten(1)),
    "into a value": lambda m, x: (lambda y: (y.copy_(x), m.c(m.b(y))))(m.a(x)),
    "input between two readers": lambda m, x: (lambda z: (lambda p, q: m.c(p + m.b(z)))(m.a(z), z.mul_(2)))(x * 1),
}


@pytest.mark.parametrize("case", WRITTEN)
def test_what_is_written_in_between_is_computed_as_before(case: str) -> None:
    model = Computes(WRITTEN[case], **layers())
    graph_module = infer_shapes(torch.fx.symbolic_trace(model), X)
    ConvertToChannelsLast()(graph_module)
    assert refused(graph_module) == [("a", "mutated")]


def test_a_single_convolution_does_not_pay() -> None:
    graph_module = infer_shapes(torch.fx.symbolic_trace(nn.Sequential(nn.Conv2d(3, 4, 3))), X)
    ConvertToChannelsLast()(graph_module)
    (refusal,) = history(graph_module)[-1].refusals
    assert (refusal.site, refusal.reason) == ("0", "more-conversions")
    assert "1 convolutions" in refusal.message


def test_unknown_shapes_are_asked_for() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    graph_module = ConvertToChannelsLast()(torch.fx.symbolic_trace(model))
    assert refused(graph_module) == [("0", "shape-unknown"), ("2", "shape-unknown")]
    ConvertToChannelsLast()(infer_shapes(graph_module, X), expect=1)


def test_unbatched_images_and_other_dtypes_stay() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    ConvertToChannelsLast()(infer_shapes(torch.fx.symbolic_trace(model), X[0]), expect=0)
    ConvertToChannelsLast()(infer_shapes(torch.fx.symbolic_trace(model.double()), X.double()), expect=0)


def test_a_model_that_works_channels_last_already_stays() -> None:
    last = X.contiguous(memory_format=torch.channels_last)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 4, 3))
    graph_module = ConvertToChannelsLast()(infer_shapes(torch.fx.symbolic_trace(model), last), expect=0)
    assert operations(graph_module) == ["Conv2d", "ReLU", "Conv2d"]
