"""`QuantizedLinear`: what it computes, for which inputs, and that it never goes stale."""

from __future__ import annotations

import copy
import io
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fxopt_core import FxoptError
from fxopt_cpu import QuantizedLinear
from fxopt_cpu.layers import quantized_linear
from fxopt_cpu.operators.rounding import dequantized, quantized
from fxopt_rewrite import refresh

IN, OUT = 64, 96


def layer_of(linear: nn.Linear) -> QuantizedLinear:
    layer = QuantizedLinear(linear.in_features, linear.out_features, bias=linear.bias is not None)
    layer.weight, layer.scale = quantized(linear.weight)
    if linear.bias is not None:
        layer.bias = nn.Parameter(linear.bias.detach().clone(), requires_grad=False)
    return layer


@pytest.fixture
def linear() -> nn.Linear:
    return nn.Linear(IN, OUT).requires_grad_(False)


@pytest.fixture
def layer(linear: nn.Linear) -> QuantizedLinear:
    return layer_of(linear)


def sqnr(found: Tensor, expected: Tensor) -> float:
    """Signal over error, in dB."""
    return float(10 * torch.log10(expected.double().square().sum() / (found - expected).double().square().sum()))


# --- Accuracy


@pytest.mark.parametrize("shape", [(IN,), (1, IN), (7, IN), (2, 3, IN), (2, 1, 3, 4, IN)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_any_rank_is_right_to_a_hundredth(shape: tuple[int, ...], bias: bool) -> None:
    linear = nn.Linear(IN, OUT, bias=bias).requires_grad_(False)
    x = torch.randn(shape)
    found = layer_of(linear)(x)
    assert found.shape == (*shape[:-1], OUT)
    assert sqnr(found, linear(x)) > 36


@pytest.mark.parametrize("shape", [(0, IN), (2, 0, IN)], ids=str)
def test_an_empty_batch_gives_an_empty_result(layer: QuantizedLinear, shape: tuple[int, ...]) -> None:
    assert layer(torch.empty(shape)).shape == (*shape[:-1], OUT)


def test_each_output_channel_has_its_own_scale() -> None:
    linear = nn.Linear(IN, OUT, bias=False).requires_grad_(False)
    linear.weight *= torch.logspace(-4, 4, OUT).unsqueeze(1)
    x = torch.randn(16, IN)
    found, expected = layer_of(linear)(x), linear(x)
    assert min(sqnr(found[:, channel], expected[:, channel]) for channel in range(OUT)) > 30


def test_the_largest_products_do_not_saturate() -> None:
    layer = QuantizedLinear(IN, 2, bias=False)
    layer.weight.copy_(torch.tensor([[127], [-127]]).expand(2, IN))
    x = torch.full((3, IN), 255.0)
    torch.testing.assert_close(layer(x), torch.tensor([127.0, -127.0]).expand(3, 2) * 255 * IN)


def test_zero_weights_and_zero_inputs_are_exact(linear: nn.Linear) -> None:
    linear.weight[3] = 0
    layer = layer_of(linear)
    torch.testing.assert_close(layer(torch.zeros(4, IN)), linear.bias.expand(4, OUT))
    assert torch.equal(layer(torch.randn(4, IN))[:, 3], linear.bias[3].expand(4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_activations_give_narrow_results(layer: QuantizedLinear, linear: nn.Linear, dtype: torch.dtype) -> None:
    x = torch.randn(5, IN, dtype=dtype)
    found = layer(x)
    assert found.dtype == dtype
    assert sqnr(found.float(), linear(x.float())) > 35


# --- A scale for each row


@pytest.mark.parametrize("shape", [(IN,), (7, IN), (2, 3, IN), (0, IN)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_rows_of_their_own_scale_are_right_each(shape: tuple[int, ...], bias: bool) -> None:
    linear = nn.Linear(IN, OUT, bias=bias).requires_grad_(False)
    layer = layer_of(linear)
    x = torch.randn(shape) * torch.logspace(-3, 3, shape[-2] if len(shape) > 1 else 1).unsqueeze(-1)
    x = x.reshape(shape)
    found, expected = layer(x).reshape(-1, OUT), linear(x).reshape(-1, OUT)
    assert layer(x).shape == (*shape[:-1], OUT)
    assert all(sqnr(one, other) > 33 for one, other in zip(found, expected, strict=True))


def test_rows_of_their_own_scale_do_not_depend_on_the_batch(linear: nn.Linear) -> None:
    layer = layer_of(linear)
    x = torch.cat(
        [torch.ones(1, IN), -torch.ones(1, IN), torch.randn(6, IN), torch.nn.functional.gelu(torch.randn(2, IN))]
    )
    alone = torch.cat([layer(row.unsqueeze(0)) for row in x])
    assert torch.equal(layer(x), alone)
    x[5], x[6], x[7, 0] = 1e6, 0.0, -1e5
    assert torch.equal(layer(x)[:5], alone[:5])
    assert torch.equal(layer(x)[8:], alone[8:])
    assert linear.bias is not None
    torch.testing.assert_close(layer(x)[6], linear.bias)
    x[7, 3] = math.nan
    assert bool(layer(x)[:7].isfinite().all())
    assert bool(layer(x)[7].isnan().all())


# --- What the operator does not take


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_value_that_is_not_finite_stays_in_its_row(layer: QuantizedLinear, linear: nn.Linear, value: float) -> None:
    x = torch.randn(5, IN)
    x[2, 7] = value
    found, expected = layer(x), linear(x)
    torch.testing.assert_close(found.isfinite(), expected.isfinite())
    assert sqnr(found[:2], expected[:2]) > 36
    torch.testing.assert_close(
        found[2], F.linear(x, layer.weight * layer.scale.unsqueeze(1), layer.bias)[2], equal_nan=True
    )


def test_a_wrong_size_is_torchs_own_error(layer: QuantizedLinear) -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.randn(3, IN + 1))


def test_doubles_are_multiplied_by_the_dequantized_weight(layer: QuantizedLinear) -> None:
    x = torch.randn(3, IN, dtype=torch.float64)
    assert layer.bias is not None
    expected = F.linear(x, dequantized(layer.weight, layer.scale, torch.float64), layer.bias.double())
    torch.testing.assert_close(layer(x), expected)


def test_recorded_calls_show_torchs_own_operations(layer: QuantizedLinear, linear: nn.Linear) -> None:
    x = torch.randn(3, IN)
    exported = torch.export.export(layer, (x,)).module()
    assert sqnr(exported(x), linear(x)) > 36
    assert sqnr(torch.vmap(layer)(x), linear(x)) > 36
    with torch.autocast("cpu"):
        assert layer(x).dtype == torch.bfloat16


def test_a_missing_operator_is_no_error(
    monkeypatch: pytest.MonkeyPatch, layer: QuantizedLinear, linear: nn.Linear
) -> None:
    monkeypatch.setattr(quantized_linear, "_ENGINES", ())
    x = torch.randn(3, IN)
    assert sqnr(layer(x), linear(x)) > 36


# --- Derivatives


def test_a_backward_pass_is_an_error_in_words_and_forward_is_none(layer: QuantizedLinear) -> None:
    x = torch.randn(3, IN, requires_grad=True)
    found = layer(x)
    assert torch.equal(found, layer(x.detach()))
    with pytest.raises(FxoptError, match="has no derivative"):
        found.sum().backward()


def test_a_bias_that_asks_for_gradients_gets_the_same_error(layer: QuantizedLinear) -> None:
    assert layer.bias is not None
    layer.bias.requires_grad_(True)
    with pytest.raises(FxoptError, match="Train the original model"):
        layer(torch.randn(3, IN)).sum().backward()


# --- State


def test_a_state_dict_holds_plain_tensors(layer: QuantizedLinear) -> None:
    layer(torch.randn(3, IN))
    held = {key: (tensor.dtype, tuple(tensor.shape)) for key, tensor in layer.state_dict().items()}
    floating = torch.float32, (OUT,)
    assert held == {"bias": floating, "weight": (torch.int8, (OUT, IN)), "scale": floating}


def test_what_was_packed_never_goes_stale(layer: QuantizedLinear) -> None:
    x, other = torch.randn(3, IN), layer_of(nn.Linear(IN, OUT))
    assert layer.bias is not None and other.bias is not None

    def assert_fresh() -> None:
        fresh = QuantizedLinear(IN, OUT)
        fresh.load_state_dict(layer.state_dict())
        assert torch.equal(layer(x), fresh(x).detach())

    assert_fresh()
    layer.scale.mul_(2)
    assert_fresh()
    layer.weight.neg_()
    assert_fresh()
    with torch.no_grad():
        layer.bias.add_(1)
    assert_fresh()
    layer.load_state_dict(other.state_dict())
    assert_fresh()
    layer.load_state_dict({key: tensor + 1 for key, tensor in other.state_dict().items()}, assign=True)
    assert_fresh()


def test_copies_and_pickles_compute_the_same(layer: QuantizedLinear) -> None:
    x = torch.randn(3, IN)
    expected = layer(x)
    file = io.BytesIO()
    torch.save(layer, file)
    file.seek(0)
    for again in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(file, weights_only=False)):
        assert torch.equal(again(x), expected)


def test_converting_keeps_scales_in_float32(layer: QuantizedLinear) -> None:
    x, expected = torch.randn(3, IN), layer.scale.clone()
    before = layer(x)
    for dtype in (torch.float16, torch.bfloat16, torch.float64, torch.float32):
        layer.to(dtype)
        assert layer.scale.dtype == torch.float32
        assert torch.equal(layer.scale, expected)
        assert layer.weight.dtype == torch.int8
    assert sqnr(layer(x), before) > 40


def test_buffers_made_in_inference_mode_are_not_packed(layer: QuantizedLinear, linear: nn.Linear) -> None:
    with torch.inference_mode():
        layer.weight = layer.weight.clone()
    x = torch.randn(3, IN)
    assert sqnr(layer(x), linear(x)) > 36


def test_torchs_engine_is_what_it_was(layer: QuantizedLinear) -> None:
    before = torch.backends.quantized.engine
    layer(torch.randn(3, IN))
    assert torch.backends.quantized.engine == before


def test_processors_without_wide_sums_round_to_seven_bits_by_rows(
    monkeypatch: pytest.MonkeyPatch, layer: QuantizedLinear, linear: nn.Linear
) -> None:
    monkeypatch.setattr(quantized_linear, "has_wide_sums", lambda: False)
    x = torch.randn(16, IN)
    assert 30 < sqnr(layer(x), linear(x)) < 40
    x[0] *= 1000
    assert sqnr(layer(x)[1:], linear(x)[1:]) > 30


def test_writes_past_torch_are_noticed(layer: QuantizedLinear) -> None:
    """Through ``data``; of single numbers after `refresh`."""
    x = torch.randn(4, IN)
    layer(x)
    for tensor in (layer.weight, layer.scale):
        tensor.data.mul_(-1)
        assert sqnr(layer(x), layer._plain(x)) > 36
    layer.weight.data.view(-1)[5::8] = 100
    refresh(layer)
    assert sqnr(layer(x), layer._plain(x)) > 36
