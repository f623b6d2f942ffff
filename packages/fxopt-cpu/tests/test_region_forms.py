"""Norms, pools, gates and views between layers are in plans in every form that models write them in."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from region_plans import plans_of
from site_passes import Computes
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_capture import capture
from fxopt_core import registry
from fxopt_cpu.library import ISAS, isa
from fxopt_cpu.regions.finding import regions_of
from fxopt_testing.rewrites import graph_of

pytestmark = pytest.mark.skipif(isa() not in ISAS[1:], reason="convolutions are planned on processors with AVX2")

Between = Callable[["Images", Tensor], Tensor]


class Images(nn.Module):
    """Two convolutions with something between them."""

    def __init__(self, between: Between) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1)
        self.norm, self.root, self.plain = (
            nn.LayerNorm(8, 1e-6),
            nn.RMSNorm(8),
            nn.LayerNorm(8, elementwise_affine=False),
        )
        self.grouped = nn.GroupNorm(4, 8)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.squeeze, self.excite = nn.Conv2d(8, 2, 1), nn.Conv2d(2, 8, 1)
        self.scale, self.gain, self.shift = (nn.Parameter(torch.rand(8)) for _ in range(3))
        self.tall = nn.Parameter(torch.rand(8, 1, 1))
        self.mean, self.largest = nn.AvgPool2d(2), nn.MaxPool2d(2)
        self.between = between

    def forward(self, x: Tensor) -> Any:
        """Return images."""
        return self.second(self.between(self, self.first(x)))


def _convnext(self: Images, x: Tensor) -> Tensor:
    y: Tensor = self.down(F.gelu(self.up(self.norm(x.permute(0, 2, 3, 1))))).permute(0, 3, 1, 2)
    return x + y * self.scale.reshape(1, -1, 1, 1)


def _twice(x: Tensor) -> Tensor:
    return F.relu(x) * x


def _last(norm: Callable[[Images, Tensor], Tensor]) -> Between:
    return lambda self, x: norm(self, x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


BETWEEN: dict[str, Between] = {
    "convnext": _convnext,
    "layer norm": _last(lambda self, x: self.norm(x)),
    "F.layer_norm": _last(lambda self, x: F.layer_norm(x, (8,), self.gain, self.shift, 1e-6)),
    "F.layer_norm with a weight": _last(lambda self, x: F.layer_norm(x, (8,), self.gain)),
    "F.layer_norm alone": _last(lambda self, x: F.layer_norm(x, [8])),
    "layer norm alone": _last(lambda self, x: self.plain(x)),
    "RMS norm": _last(lambda self, x: self.root(x)),
    "F.rms_norm": _last(lambda self, x: F.rms_norm(x, (8,), self.gain, 1e-6)),
    "F.rms_norm alone": _last(lambda self, x: F.rms_norm(x, (8,))),
    "scale of rows": lambda self, x: x * self.scale[:, None, None],
    "tall scale": lambda self, x: self.tall * x,
    "scale of the last dimension": _last(lambda self, x: x * self.scale + self.shift),
    "gate": lambda self, x: x * torch.sigmoid(self.excite(F.silu(self.squeeze(x.mean((2, 3), keepdim=True))))),
    "hard gate": lambda self, x: x * F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1))))),
    "gate of rows": lambda self, x: x * x.mean([-2, -1]).sigmoid()[:, :, None, None],
    "hardswish": lambda self, x: F.hardswish(x) * x,
    "mean pool": lambda self, x: self.mean(x),
    "largest": lambda self, x: self.largest(x),
    "F.avg_pool2d": lambda self, x: F.avg_pool2d(x, 3, 2, 1),
    "F.avg_pool2d, cut off": lambda self, x: F.avg_pool2d(x, 2, 2, ceil_mode=True),
    "F.avg_pool2d, cut off, without zeros": lambda self, x: F.avg_pool2d(x, 3, 2, 1, True, False),
    "F.max_pool2d, cut off": lambda self, x: F.max_pool2d(x, 3, 2, 1, ceil_mode=True),
    "F.max_pool2d, cut off before the end": lambda self, x: F.max_pool2d(x, 1, 3, ceil_mode=True),
    "group norm": lambda self, x: F.gelu(self.grouped(x)),
    "F.group_norm": lambda self, x: F.relu(F.group_norm(x, 2, self.gain, self.shift, 1e-6)) + x,
    "F.group_norm of rows": lambda self, x: F.silu(F.group_norm(x.flatten(2), 8, self.gain)).view(x.shape),
    "F.group_norm by itself, read twice": lambda self, x: _twice(F.group_norm(x, 1)),
    "F.instance_norm": lambda self, x: F.relu(F.instance_norm(x, weight=self.gain, bias=self.shift)),
    "F.instance_norm by itself": lambda self, x: F.instance_norm(x),
    "movedim": lambda self, x: self.norm(x.movedim(1, -1)).movedim(-1, 1),
    "rows": lambda self, x: self.norm(x.flatten(2).transpose(1, 2)).mT.unflatten(2, x.shape[-2:]),
    "swapped": lambda self, x: self.norm(x.flatten(2).swapaxes(1, 2)).swapaxes(1, 2).view(x.shape),
    "squeezed": lambda self, x: x * x.mean((2, 3), True).squeeze(-1).unsqueeze(-1),
}


def optimized(model: nn.Module, x: Tensor, form: str) -> GraphModule:
    if form == "exported":
        graph_module: GraphModule = capture(model, (x,), dynamic_shapes=({},))
    else:
        graph_module = graph_of(model, "export" if form == "export" else "modules", x)
    return registry().pipeline("cpu-inference")(graph_module)


def _computes(node: Any) -> bool:
    return node.op in ("call_function", "call_method", "call_module") and "_guards_fn" not in node.name


@torch.no_grad()
@pytest.mark.parametrize(
    ("form", "layout"),
    [
        ("exported", torch.contiguous_format),
        ("traced", torch.contiguous_format),
        ("traced", torch.channels_last),
        pytest.param("exported", torch.channels_last, marks=pytest.mark.nightly),
    ],
)
@pytest.mark.parametrize("between", BETWEEN.values(), ids=BETWEEN.keys())
def test_a_model_is_one_plan(between: Between, form: str, layout: torch.memory_format) -> None:
    torch.manual_seed(0)
    model, x = Images(between).eval(), torch.randn(2, 3, 9, 8).to(memory_format=layout)
    graph_module = optimized(model, x, form)
    (region,) = regions_of(graph_module)
    left = {node.name for node in graph_module.graph.nodes if _computes(node)} - {node.name for node in region.nodes}
    left = {name for name in left if not name.startswith("sym_size")}
    assert left <= {"contiguous_default_1"}  # which gives the result the strides of the input
    wanted = model(x)
    found = [graph_module(x) for _ in range(3)]
    torch.testing.assert_close(found[0], wanted, rtol=1e-4, atol=1e-5)
    assert all(torch.equal(found[0], other) for other in found)
    assert found[0].stride() == wanted.stride()
    assert len(plans_of(graph_module)) == 1


@torch.no_grad()
@pytest.mark.parametrize(
    ("form", "between"),
    [
        ("exported", BETWEEN["F.layer_norm"]),
        ("export", BETWEEN["F.layer_norm"]),  # which reads all tensors before it checks its inputs
        ("export", lambda self, x: F.batch_norm(F.relu(x), self.shift, self.gain)),
    ],
)
def test_weights_of_norms_and_scales_are_read_at_each_call(form: str, between: Between) -> None:
    model, x = Images(between).eval(), torch.randn(2, 3, 9, 8)
    graph_module = optimized(model, x, form)
    before = graph_module(x)
    assert len(plans_of(graph_module)) == 1
    for key in ("gain", "shift"):
        getattr(model, key).add_(0.5)
        torch.testing.assert_close(graph_module(x), model(x), rtol=1e-4, atol=1e-5)
        assert not torch.equal(graph_module(x), before)
    graph_module.gain = nn.Parameter(torch.zeros(8))
    model.gain.zero_()
    torch.testing.assert_close(graph_module(x), model(x), rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("cls", [nn.LayerNorm, nn.RMSNorm])
def test_norms_of_strided_values_have_the_strides_of_eager(cls: Any) -> None:
    def both(m: Any, x: Tensor) -> Any:
        """Return a norm over the columns, and images."""
        y = m.first(x)
        return m.norm(y), m.second(y)

    model = Computes(both, first=nn.Conv2d(3, 8, 1), second=nn.Conv2d(8, 8, 1), norm=cls(5)).eval()
    x = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
    graph_module = optimized(model, x, "exported")
    for found, wanted in zip(graph_module(x), model(x), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        assert found.stride() == wanted.stride()
