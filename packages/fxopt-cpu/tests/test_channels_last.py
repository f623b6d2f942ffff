"""`FuseConvolutions`: which results are channels last, and that nothing shows of it outside."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from onednn_forms import check, packed
from site_passes import Computes
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from fxopt_core import Instrument, instrumented, iter_nodes
from fxopt_cpu import FuseConvolutions
from fxopt_rewrite import infer_shapes
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import graph_of

X = torch.randn(2, 3, 8, 8)
OTHERS = [(torch.randn(5, 3, 8, 8),), (torch.randn(0, 3, 8, 8),), (torch.randn(1, 3, 8, 8),)]


def layers() -> dict[str, nn.Module]:
    """Convolutions that keep the size of their images."""
    return {name: nn.Conv2d(3, 3, 3, padding=1) for name in ("a", "b", "c", "d")}


CASES: dict[str, tuple[Callable[[Any, Tensor], Any], int]] = {
    "chain": (lambda m, x: m.c(F.relu(m.b(F.relu(m.a(x))))), 2),
    "pooled": (lambda m, x: F.adaptive_avg_pool2d(m.b(m.a(x)), 1).flatten(1), 1),
    "mean": (lambda m, x: m.b(m.a(x)).mean((2, 3)), 1),
    "residual": (lambda m, x: (lambda y: m.c(y + m.b(y)))(m.a(x)), 2),
    "residual of the input": (lambda m, x: m.b(x + m.a(x)), 1),
    "branches": (lambda m, x: torch.cat([m.a(x), m.b(x), m.c(x)], 1), 0),
    "two results": (lambda m, x: (lambda y: (m.c(m.b(y)), F.relu(y)))(m.a(x)), 1),
    "returned and read": (lambda m, x: (lambda y: (y, m.c(m.b(F.relu(y)))))(m.a(x)), 1),
    "padded": (lambda m, x: m.b(m.a(F.pad(x, (1, 1, 1, 1)))), 1),
    "viewed": (lambda m, x: m.c(m.b(m.a(x)).view(-1, 3, 4, 16)) + m.d(x).view(-1, 3, 4, 16), 1),
    "reshaped": (lambda m, x: m.b(m.a(x)).reshape(-1, 192) @ torch.ones(192, 2), 2),
    "in place": (lambda m, x: m.b(m.a(x).relu_().add_(x)), 1),
    # Three numbers that are nearly the same have next to no variance, by which rounding would be divided.
    "permuted": (lambda m, x: F.layer_norm(m.b(m.a(x)).permute(0, 2, 3, 1), (3,), eps=0.1).permute(0, 3, 1, 2), 2),
    "permuted and returned": (lambda m, x: m.b(m.a(x)).permute(0, 2, 3, 1), 1),
    "chunks": (lambda m, x: (lambda y: m.c(y[0] * y[1] + y[2]))(m.b(m.a(x)).repeat(1, 3, 1, 1).chunk(3, 1)), 1),
    "attention": (lambda m, x: (lambda y: m.b(y * torch.sigmoid(m.c(y.mean((2, 3), keepdim=True)))))(m.a(x)), 2),
    "pools and sums": (
        lambda m, x: m.c(torch.cat([F.max_pool2d(y := F.silu(m.a(x)), 2), F.avg_pool2d(y + m.b(y), 2)], 1)[:, :3]),
        2,
    ),
    "vectors": (lambda m, x: m.b(F.batch_norm(m.a(x) * torch.ones(3, 1, 1), torch.ones(3), torch.ones(3))), 1),
    "one element": (lambda m, x: m.c(F.relu(m.b(F.adaptive_avg_pool2d(m.a(x), 1)))).flatten(1), 2),
    "of rows": (lambda m, x: m.a(x.flatten(2).transpose(1, 2).contiguous().transpose(1, 2).view(x.shape)), 0),
    "sizes": (lambda m, x: (lambda y: F.interpolate(m.b(y), size=(y.shape[2], 4)))(m.a(x)), 1),
}


@pytest.mark.parametrize("form", ["export-dynamic", pytest.param("modules", marks=pytest.mark.nightly)])
@pytest.mark.parametrize("case", CASES)
@torch.no_grad()
def test_results_are_laid_out_as_before(case: str, form: Form) -> None:
    function, count = CASES[case]
    model = Computes(function, **layers())
    graph_module = check(FuseConvolutions(), model, X, form=form, others=OTHERS)
    assert [layer.memory_format for layer in packed(graph_module)].count("channels_last") == count
    for x in (X, OTHERS[0][0], OTHERS[2][0]):
        for one, other in zip(tree_leaves(graph_module(x)), tree_leaves(model(x)), strict=True):
            assert one.stride() == other.stride()
            torch.testing.assert_close(one, other)


def strides(graph_module: GraphModule) -> dict[str, list[str]]:
    """The described strides of all values, sizes that vary as text; none where there is one element."""
    values = {node.name: node.meta.get("val") for node in iter_nodes(graph_module.graph)}
    return {
        name: [str(step) for size, step in zip(value.shape, value.stride(), strict=True) if str(size) != "1"]
        for name, value in values.items()
        if isinstance(value, Tensor)
    }


@pytest.mark.parametrize("case", CASES)
def test_strides_are_described_as_they_are_and_come_back(case: str) -> None:
    graph_module, transformation = (
        graph_of(Computes(CASES[case][0], **layers()), "export-dynamic", X),
        FuseConvolutions(),
    )
    images = [node.meta["val"] for node in graph_module.graph.find_nodes(op="placeholder")]
    before = strides(graph_module)
    described = strides(transformation(graph_module))
    assert described == strides(infer_shapes(graph_module, *images))
    assert strides(transformation(graph_module, reverse=True)) == before


WRITTEN: dict[str, Callable[[Any, Tensor], Any]] = {
    "through a view": lambda m, x: (lambda y, v: (v.add_(1), m.c(m.b(y))))(y := m.a(x), y.flatten(1)),
    "into a value": lambda m, x: (lambda y: (y.copy_(x), m.c(m.b(y))))(m.a(x)),
    "input between two readers": lambda m, x: (lambda z: (lambda p, q: m.c(p + m.b(z)))(m.a(z), z.mul_(2)))(x * 1),
}


@pytest.mark.parametrize("case", WRITTEN)
@torch.no_grad()
def test_what_is_written_in_between_is_computed_as_before(case: str) -> None:
    model = Computes(WRITTEN[case], **layers())
    graph_module = FuseConvolutions()(infer_shapes(torch.fx.symbolic_trace(model), X))
    for one, other in zip(tree_leaves(graph_module(X.clone())), tree_leaves(model(X.clone())), strict=True):
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other)


@torch.no_grad()
def test_a_convolution_that_an_instrument_leaves_out_reads_what_it_read() -> None:
    """Its readers may view its result."""
    model = Computes(lambda m, x: m.c(m.b(m.a(x))).view(-1, 192), **layers())

    class Without(Instrument):
        def should_rewrite(self, run: Any, graph_module: GraphModule, site: str, nodes: tuple[Any, ...]) -> bool:
            return site != "c"

    with instrumented(Without()):
        graph_module = FuseConvolutions()(graph_of(model, "export", X))
    assert len(packed(graph_module)) == 2
    torch.testing.assert_close(graph_module(X), model(X))
