"""The folds of batch norm into convolutions: where, where not, and why not."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from norm_models import Computes, chain
from torch import Tensor, nn

from fxopt_core import Transformation
from fxopt_norm import (
    FuseBatchNorm1dInConv1d,
    FuseBatchNorm2dInConv2d,
    FuseBatchNorm3dInConv3d,
    FuseBatchNormInConvTranspose,
)
from fxopt_rewrite import infer_shapes
from fxopt_testing import assert_rewrites
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import graph_of, refused


def pair(**options: Any) -> nn.Module:
    return chain(nn.Conv2d(3, 6, 3, **options), nn.BatchNorm2d(6))


OTHERS = [(torch.randn(5, 3, 8, 8),), (torch.randn(0, 3, 8, 8),), (torch.randn(1, 3, 5, 9),)]


@pytest.mark.parametrize(
    ("form", "bias", "affine"),
    [
        *(("modules", *both) for both in product((True, False), repeat=2)),
        ("functions", True, True),
        ("export-dynamic", False, False),
    ],
)
def test_the_pair_becomes_one_convolution(form: Form, bias: bool, affine: bool) -> None:
    model = chain(nn.Conv2d(3, 6, 3, bias=bias), nn.BatchNorm2d(6, affine=affine), nn.ReLU())
    folded = assert_rewrites(
        FuseBatchNorm2dInConv2d(), model, torch.randn(2, 3, 8, 8), count=1, form=form, others=OTHERS
    )
    assert list(folded.state_dict()) == ["0_folded.weight", "0_folded.bias"]
    assert not any(isinstance(module, nn.BatchNorm2d) for module in folded.modules())
    conv = folded.get_submodule("0_folded")
    assert type(conv) is nn.Conv2d
    assert (conv.in_channels, conv.out_channels, conv.kernel_size, conv.training) == (3, 6, (3, 3), False)


SETTINGS: dict[str, dict[str, Any]] = {
    "stride": {"stride": 2},
    "strides": {"stride": (2, 1)},
    "padding": {"padding": 1},
    "paddings": {"padding": (2, 1)},
    "same": {"padding": "same"},
    "valid": {"padding": "valid"},
    "dilation": {"dilation": 2},
    "groups": {"groups": 3},
    "reflect": {"padding": 1, "padding_mode": "reflect"},
    "replicate": {"padding": (1, 2), "padding_mode": "replicate"},
    "circular": {"padding": 1, "padding_mode": "circular"},
    "reflect same": {"padding": "same", "padding_mode": "reflect"},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_of_the_convolution_are_kept(name: str) -> None:
    assert_rewrites(FuseBatchNorm2dInConv2d(), pair(**SETTINGS[name]), torch.randn(2, 3, 8, 8), count=1)


OTHER_LAYERS: dict[str, tuple[type[Transformation], nn.Module, nn.Module, tuple[int, ...]]] = {
    "1d": (FuseBatchNorm1dInConv1d, nn.Conv1d(3, 6, 3, padding="same", groups=3), nn.BatchNorm1d(6), (2, 3, 8)),
    "3d": (FuseBatchNorm3dInConv3d, nn.Conv3d(2, 4, 2, stride=2, bias=False), nn.BatchNorm3d(4), (2, 2, 4, 4, 4)),
    "transposed 1d": (
        FuseBatchNormInConvTranspose,
        nn.ConvTranspose1d(4, 6, 3, stride=2),
        nn.BatchNorm1d(6),
        (2, 4, 5),
    ),
    "transposed 2d": (
        FuseBatchNormInConvTranspose,
        nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, output_padding=1, groups=2),
        nn.BatchNorm2d(6),
        (2, 4, 5, 5),
    ),
    "transposed 3d": (
        FuseBatchNormInConvTranspose,
        nn.ConvTranspose3d(4, 2, 2, dilation=2, groups=2, bias=False),
        nn.BatchNorm3d(2, affine=False),
        (2, 4, 3, 3, 3),
    ),
}


@pytest.mark.parametrize("name", OTHER_LAYERS)
def test_other_dimensions_and_transposed_convolutions(name: str) -> None:
    cls, layer, norm, size = OTHER_LAYERS[name]
    folded = assert_rewrites(cls(), chain(layer, norm), torch.randn(*size), count=1)
    assert type(folded.get_submodule("0_folded")) is type(layer)


def test_each_pass_folds_into_its_own_layers_only() -> None:
    passes = {cls: name for name, (cls, *_) in OTHER_LAYERS.items()} | {FuseBatchNorm2dInConv2d: "2d"}
    for cls, mine in passes.items():
        for name, (own, layer, norm, size) in OTHER_LAYERS.items():
            if own is not cls:
                graph_module = graph_of(chain(layer, norm), "modules", torch.randn(*size))
                cls()(graph_module, expect=0)
                assert refused(graph_module) == [], (mine, name)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_statistics_in_float32_go_with_half_convolutions(dtype: torch.dtype) -> None:
    model = chain(nn.Conv2d(3, 6, 3).to(dtype), nn.BatchNorm2d(6))
    x = torch.randn(2, 3, 8, 8, dtype=dtype)
    assert_rewrites(FuseBatchNorm2dInConv2d(), model, x, count=1, gradients=False)


@pytest.mark.parametrize("eps", [1e-12, 1e-5, 0.5, 100.0])
@pytest.mark.parametrize("variance", [1e-10, 1.0, 1e6])
def test_extreme_eps_and_variances(eps: float, variance: float) -> None:
    model = chain(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, eps=eps, momentum=None))
    norm = model.get_submodule("1")
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_var is not None
    norm.running_var.fill_(variance)
    norm.running_mean = torch.zeros(4)
    x = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert_rewrites(FuseBatchNorm2dInConv2d(), model.double(), x, count=1, gradients=False)


def test_memory_formats() -> None:
    model = pair(padding=1).to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's hints lack it
    others = [(x.to(memory_format=torch.channels_last),) for (x,) in OTHERS] + [
        (torch.randn(2, 8, 8, 3).movedim(3, 1),)
    ]
    folded = assert_rewrites(FuseBatchNorm2dInConv2d(), model, torch.randn(2, 3, 8, 8), count=1, others=others)
    assert folded.get_parameter("0_folded.weight").is_contiguous(memory_format=torch.channels_last)


def test_meta_tensors_take_no_memory() -> None:
    graph_module = graph_of(pair().to("meta"), "modules", torch.randn(2, 3, 8, 8, device="meta"))
    FuseBatchNorm2dInConv2d()(graph_module, expect=1)
    assert all(tensor.is_meta for tensor in graph_module.state_dict().values())


def functional(m: Any, x: Tensor) -> Tensor:
    y = F.conv2d(F.pad(x, (1, 1, 1, 1)), m.conv.weight, bias=m.conv.bias, stride=2)
    return F.batch_norm(y, m.bn.running_mean, m.bn.running_var, weight=m.bn.weight, bias=m.bn.bias, eps=1e-3).relu()


def torch_functions(m: Any, x: Tensor) -> Tensor:
    y = torch.conv2d(x, m.conv.weight, None, (2, 2), "valid")
    return torch.batch_norm(
        y, m.bn.weight, m.bn.bias, m.bn.running_mean, m.bn.running_var, False, 0.1, 1e-5, torch.backends.cudnn.enabled
    )


@pytest.mark.parametrize("forward", [functional, torch_functions])
def test_functional_forms(forward: Callable[[Any, Tensor], Tensor]) -> None:
    model = Computes(forward, conv=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4))
    folded = assert_rewrites(FuseBatchNorm2dInConv2d(), model, torch.randn(2, 3, 8, 8), count=1)
    assert "conv_folded.weight" in folded.state_dict()
    assert not any("bn" in key for key in folded.state_dict())


def test_unbatched_values_are_normalised_over_another_axis() -> None:
    model = chain(nn.Conv1d(3, 4, 3, padding=1), nn.BatchNorm1d(4))
    graph_module = torch.fx.symbolic_trace(model)
    FuseBatchNorm1dInConv1d()(graph_module, expect=0)
    assert [reason for _, reason in refused(graph_module)] == ["shape-unknown"]
    infer_shapes(graph_module, torch.randn(3, 4))  # no batch: batch norm works on what is 4 long here, the positions
    FuseBatchNorm1dInConv1d()(graph_module, expect=0)
    assert [reason for _, reason in refused(graph_module)] == ["wrong-axis"]


def test_a_convolution_in_train_mode_in_front_of_frozen_statistics_is_folded() -> None:
    model = pair()
    model.train()
    model.get_submodule("1").eval()
    folded = assert_rewrites(FuseBatchNorm2dInConv2d(), model, torch.randn(2, 3, 8, 8), count=1)
    assert folded.get_submodule("0_folded").training


SHARED: dict[str, tuple[Callable[[Any, Tensor], Any], str]] = {
    "result used twice": (lambda m, x: (lambda y: m.bn(y) + y)(m.conv(x)), "several-users"),
    "result returned": (lambda m, x: (lambda y: (m.bn(y), y))(m.conv(x)), "several-users"),
    "convolution called twice": (lambda m, x: m.bn(m.conv(x)) + m.conv(x * 2), "shared-module"),
    "batch norm called twice": (lambda m, x: m.bn(m.conv(x)) + m.bn(x[:, [0, 1, 2, 0], :6, :6]), "shared-module"),
    "weight read elsewhere": (lambda m, x: m.bn(m.conv(x)) + m.conv.weight.sum(), "tied-parameter"),
    "statistics read elsewhere": (lambda m, x: m.bn(m.conv(x)) + m.bn.running_mean.sum(), "tied-parameter"),
}  # fmt: skip


@pytest.mark.parametrize("name", SHARED)
def test_what_is_used_elsewhere_is_left_alone(name: str) -> None:
    forward, reason = SHARED[name]
    model = Computes(forward, conv=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4))
    folded = assert_rewrites(FuseBatchNorm2dInConv2d(), model, torch.randn(2, 3, 8, 8), count=0)
    assert {reason for _, reason in refused(folded)} == {reason}


SHAPE_READS: dict[str, Callable[[Tensor], Any]] = {
    "size": lambda y: y.size(0),
    "shape": lambda y: y.shape[1],
    "ndim": lambda y: y.ndim,
    "dim": lambda y: y.dim(),
    "numel": lambda y: y.numel() // 100,
}


@pytest.mark.parametrize("name", SHAPE_READS)
def test_who_asks_for_the_shape_between_them_gets_it(name: str) -> None:
    def forward(m: Any, x: Tensor) -> Any:
        y = m.conv(x)
        return m.bn(y) * SHAPE_READS[name](y)

    model = Computes(forward, conv=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4))
    assert_rewrites(FuseBatchNorm2dInConv2d(), model, torch.randn(2, 3, 8, 8), count=1)


def test_in_place_operations_around_and_between() -> None:
    def between(m: Any, x: Tensor) -> Any:
        y = m.conv(x)
        y.add_(1)
        return m.bn(y)

    def around(m: Any, x: Tensor) -> Any:
        y = m.conv(x)
        x.mul_(2)
        z = m.bn(y)
        return F.relu(z, inplace=True) + x.sum()

    for forward, sites in ((between, 0), (around, 1)):
        model = Computes(forward, conv=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4))
        assert_rewrites(FuseBatchNorm2dInConv2d(), model, torch.randn(2, 3, 8, 8), count=sites, gradients=False)


def test_statistics_that_are_written_in_the_graph_are_left_alone() -> None:
    def forward(m: Any, x: Tensor) -> Any:
        m.bn.running_mean.add_(1)
        return m.bn(m.conv(x))

    model = Computes(forward, conv=nn.Conv2d(3, 4, 3), bn=nn.BatchNorm2d(4))

    graph_module = graph_of(model, "modules", torch.randn(2, 3, 8, 8))
    FuseBatchNorm2dInConv2d()(graph_module, expect=0)
    assert refused(graph_module) == [("bn", "mutated")]


def test_frozen_stays_frozen_and_a_mix_is_refused() -> None:
    for form in ("modules", "export-dynamic"):
        model = pair().requires_grad_(False)
        folded = assert_rewrites(FuseBatchNorm2dInConv2d(), model, torch.randn(2, 3, 8, 8), count=1, form=form)
        assert not any(parameter.requires_grad for parameter in folded.parameters())
        model.get_submodule("1").requires_grad_(True)
        folded = assert_rewrites(FuseBatchNorm2dInConv2d(), model, torch.randn(2, 3, 8, 8), count=0, form=form)
        assert refused(folded) == [("0 + 1", "mixed-requires-grad")]


def test_large_weights_are_scaled_block_by_block_to_the_same_values() -> None:
    model: Any = chain(nn.Conv2d(128, 700, 3), nn.BatchNorm2d(700))
    convolution, norm = model
    for layout in (torch.contiguous_format, torch.channels_last):
        convolution.weight.data = convolution.weight.data.contiguous(memory_format=layout)
        graph_module = torch.fx.symbolic_trace(model)
        factors = norm.weight.double() * torch.rsqrt(norm.running_var.double() + norm.eps)
        expected = (convolution.weight.double() * factors.reshape(-1, 1, 1, 1)).float()
        FuseBatchNorm2dInConv2d()(graph_module, expect=1)
        folded = graph_module.get_parameter("0_folded.weight")
        assert torch.equal(folded, expected)
        assert folded.stride() == convolution.weight.stride()
