"""`PackedConv2d`: the operator where it computes the same, and torch's own convolution everywhere else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fxopt_cpu import Activation, PackedConv2d
from fxopt_cpu.layers.epilogue import CODES
from fxopt_cpu.operators import onednn

X = (2, 4, 9, 8)
RELU, RELU6 = Activation("relu"), Activation("hardtanh", 0.0, 6.0)
SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "stride": {"stride": (2, 1)},
    "padding": {"padding": ((1, 1), (2, 2))},
    "dilation": {"dilation": (2, 1)},
    "groups": {"groups": 2},
    "depthwise": {"groups": 4},
    "no bias": {"bias": False},
    "more zeros after": {"padding": ((0, 1), (1, 2)), "stride": (2, 2)},
    "more zeros before": {"padding": ((2, 0), (1, 0)), "stride": (2, 2)},
    "zeros after, big stride": {"padding": ((0, 2), (0, 1)), "stride": (3, 3)},
}


def made(**options: Any) -> PackedConv2d:
    """A convolution of 4 to 8 channels with random weights."""
    conv = PackedConv2d(4, 8, (3, 2), **options).eval()
    for parameter in conv.parameters():
        nn.init.normal_(parameter, std=0.3)
    return conv


def expected(conv: PackedConv2d, x: Tensor, other: Tensor | None = None) -> Tensor:
    """What torch computes, from the plain parameters."""
    (top, bottom), (left, right) = conv.padding
    x = F.pad(x, (left, right, top, bottom))
    y = F.conv2d(x, conv.weight, conv.bias, conv.stride, 0, conv.dilation, conv.groups)
    return conv.activation(y if other is None else y + other)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the operators that were called, in order."""
    called: list[str] = []
    for name in ("CONVOLUTION", "SUM"):
        operator = getattr(onednn, name)

        def recorded(*args: Any, _operator: Any = operator, _name: str = name) -> Any:
            called.append(_name)
            return _operator(*args)

        monkeypatch.setattr(onednn, name, recorded)
    return called


@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize("setting", SETTINGS)
@torch.no_grad()
def test_every_setting_computes_what_torch_does(setting: str, last: bool, calls: list[str]) -> None:
    conv = made(**SETTINGS[setting])
    memory_format = torch.channels_last if last else torch.contiguous_format
    for shape in (X, (1, 4, 9, 8), (3, 4, 7, 13), X):
        x = torch.randn(shape).contiguous(memory_format=memory_format)
        y = conv(x)
        torch.testing.assert_close(y, expected(conv, x))
        assert y.is_contiguous(memory_format=memory_format)
    assert calls == ["CONVOLUTION"] * 4


@pytest.mark.parametrize("name", CODES)  # of which oneDNN lacks some
@torch.no_grad()
def test_every_activation_goes_along(name: str, calls: list[str]) -> None:
    conv, x = made(activation=Activation(name, *((-0.5, 0.25) if name == "hardtanh" else (0.2,)))), torch.randn(X)
    torch.testing.assert_close(conv(x), expected(conv, x))
    assert calls == ["CONVOLUTION"]


@pytest.mark.parametrize("activation", [Activation(), RELU, RELU6], ids=str)
@pytest.mark.parametrize("setting", ["plain", "no bias", "more zeros after"])
@torch.no_grad()
def test_a_sum_goes_along(setting: str, activation: Activation, calls: list[str]) -> None:
    conv, x = made(activation=activation, **SETTINGS[setting]), torch.randn(X)
    plain = PackedConv2d.__call__(made(**SETTINGS[setting]), x)
    for shape in (plain.shape, (8, 1, 1), (1, 8, 1, 1)):
        other = torch.randn(shape)
        torch.testing.assert_close(conv(x, other), expected(conv, x, other))
    assert calls.count("SUM") == (activation.name != "hardtanh")
    other = torch.randn(plain.shape, dtype=torch.float64)
    assert conv(x, other).dtype == torch.float64


@torch.no_grad()
def test_bfloat16() -> None:
    conv, x = made(activation=RELU).bfloat16(), torch.randn(X).bfloat16()
    y = conv(x)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), expected(conv, x).float(), rtol=2e-2, atol=2e-2)


@torch.no_grad()
def test_the_weight_is_packed_once_and_anew_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    packed, pack = list[Tensor](), onednn.pack_convolution

    def recorded(weight: Tensor, *settings: Any) -> Tensor:
        packed.append(weight)
        return pack(weight, *settings)

    monkeypatch.setattr(onednn, "pack_convolution", recorded)
    conv, x = made(), torch.randn(X)
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: conv.weight.mul_(2),
        lambda: setattr(conv, "weight", nn.Parameter(torch.randn_like(conv.weight))),
        lambda: conv.load_state_dict({"weight": torch.randn_like(conv.weight), "bias": torch.zeros(8)}),
        lambda: conv.load_state_dict(made().state_dict(), assign=True),
        lambda: setattr(conv.weight, "data", torch.randn_like(conv.weight)),
        lambda: conv.bfloat16().float(),
    ]
    for count, change in enumerate(changes):
        change()
        for shape in (X, (1, *X[1:]), X):
            x = torch.randn(shape)
            torch.testing.assert_close(conv(x), expected(conv, x))
        assert len(packed) == count + 1
    conv.get_parameter("bias").mul_(2)  # is read each time
    torch.testing.assert_close(conv(x), expected(conv, x))
    assert len(packed) == len(changes)


def test_calls_that_record_gradients_go_the_plain_way(calls: list[str]) -> None:
    conv, x = made(activation=RELU), torch.randn(X, requires_grad=True)
    conv(x).sum().backward()
    assert calls == []
    conv.requires_grad_(False)
    conv(x.detach())
    assert calls == ["CONVOLUTION"]
    assert conv(x).requires_grad


def under_autocast(conv: PackedConv2d, x: Tensor) -> Any:
    with torch.autocast("cpu"):
        y = conv(x)
    assert y.dtype == torch.bfloat16
    return y.float()


def under_a_mode(conv: PackedConv2d, x: Tensor) -> Any:
    with FlopCounterMode(display=False) as flops:
        y = conv(x)
    assert flops.get_total_flops() > 0
    return y


def without_onednn(conv: PackedConv2d, x: Tensor) -> Any:
    with torch.backends.mkldnn.flags(enabled=False):
        return conv(x)


def exported(conv: PackedConv2d, x: Tensor) -> Any:
    program = torch.export.export(conv, (x,), strict=False)
    assert "mkldnn" not in str(program.graph)
    return program.module()(x)


def jit_traced(conv: PackedConv2d, x: Tensor) -> Any:
    traced: Any = torch.jit.trace(conv, x, check_trace=False)  # type: ignore[no-untyped-call]  # so it is in torch
    return traced(x)


WAYS: dict[str, Callable[[PackedConv2d, Tensor], Any]] = {
    "autocast": under_autocast,
    "mode": under_a_mode,
    "switched off": without_onednn,
    "unbatched": lambda conv, x: torch.stack([conv(each) for each in x]),
    "compiled": lambda conv, x: torch.compile(conv, backend="eager", fullgraph=True)(x),
    "exported": exported,
    "fx": lambda conv, x: torch.fx.symbolic_trace(conv, {"other": None})(x),
    "jit": jit_traced,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning", "ignore:TF32 acceleration:UserWarning")
@torch.no_grad()
def test_what_watches_or_differentiates_sees_the_plain_convolution(way: str, calls: list[str]) -> None:
    conv, x = made(activation=RELU), torch.randn(X)
    tolerance = 2e-2 if way == "autocast" else 1e-5
    torch.testing.assert_close(WAYS[way](conv, x), expected(conv, x), rtol=tolerance, atol=tolerance)
    assert calls == []


@pytest.mark.parametrize("shape", [(2, 3, 9, 8), (2, 4, 1, 1), (4,), (1, 2, 4, 9, 8)])
@torch.no_grad()
def test_wrong_inputs_are_refused_as_torch_does(shape: tuple[int, ...]) -> None:
    conv = made()
    for _ in range(2):
        with pytest.raises(RuntimeError):
            conv(torch.randn(shape))
        conv(torch.randn(X))
    with pytest.raises(RuntimeError):
        conv(torch.randn(X, dtype=torch.float64))


def test_weights_of_inference_mode_cannot_be_watched_and_are_not_packed(calls: list[str]) -> None:
    with torch.inference_mode():
        conv, x = made(), torch.randn(X)
        torch.testing.assert_close(conv(x), expected(conv, x))
        assert calls == []
    conv = made()
    with torch.inference_mode():
        torch.testing.assert_close(conv(x), expected(conv, x))
    assert calls == ["CONVOLUTION"]


@pytest.mark.parametrize("lacks", ["library", "operator", "bfloat16"])
@torch.no_grad()
def test_a_processor_without_the_operators(lacks: str, monkeypatch: pytest.MonkeyPatch, calls: list[str]) -> None:
    conv, x = made(), torch.randn(X)
    if lacks == "library":
        monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)
    elif lacks == "operator":
        monkeypatch.setattr("fxopt_cpu.operators.onednn._NEEDED", ("_there_is_no_such_operator",))
    else:
        monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", lambda: False)
        conv, x = conv.bfloat16(), x.bfloat16()
    torch.testing.assert_close(conv(x), expected(conv, x))
    assert calls == []


@torch.no_grad()
def test_parameters_of_other_sizes_never_reach_the_operators(calls: list[str]) -> None:
    conv, x = made(), torch.randn(X)
    conv(x)
    conv.bias = nn.Parameter(torch.zeros(3))
    with pytest.raises(RuntimeError):
        conv(x)
    conv.bias = nn.Parameter(torch.ones(16)[::2])
    torch.testing.assert_close(conv(x), expected(conv, x))
    conv.weight = nn.Parameter(torch.randn(6, 4, 3, 2))
    conv.bias = nn.Parameter(torch.zeros(6))
    assert conv(x).shape == (2, 6, 7, 7)
    assert calls == ["CONVOLUTION"]


@pytest.mark.parametrize("batch", [1, 2])
@torch.no_grad()
def test_strides_of_images_made_of_rows(batch: int, calls: list[str]) -> None:
    conv, x = made(), torch.randn(batch, 30, 4).transpose(1, 2).view(batch, 4, 5, 6)
    assert conv(x).stride() == expected(conv, x).stride()
    assert calls == ["CONVOLUTION"]
