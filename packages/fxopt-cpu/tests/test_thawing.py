"""Whoever looks at a packed layer's weight sees a plain parameter with the plain values, and owns it."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fxopt_cpu import PanelLinear, isa
from fxopt_cpu.layers.thawing import _HARMLESS, Thawing
from fxopt_rewrite import refresh

pytestmark = pytest.mark.skipif(isa() is None, reason="the library was not built")
needs_numpy = pytest.mark.skipif(find_spec("numpy") is None, reason="there is no NumPy")


def _layer(**settings: Any) -> PanelLinear:
    torch.manual_seed(0)
    layer = PanelLinear(12, 20, **settings).eval()
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer


def _packed(**settings: Any) -> tuple[PanelLinear, Tensor, Tensor]:
    """Return a packed layer, its weight before, and an input."""
    layer = _layer(**settings)
    weight, rows = layer.weight.detach().clone(), torch.randn(3, 12)
    with torch.no_grad():
        layer(rows)
    assert _frozen(layer._parameters)
    return layer, weight, rows


def _frozen(held: object) -> bool:
    """Return whether the dictionary of a layer has dropped its values."""
    assert isinstance(held, Thawing)
    return held.frozen


def _run(layer: Callable[..., Any], rows: Tensor) -> Tensor:
    with torch.no_grad():
        found: Tensor = layer(rows)
    return found


def test_every_method_of_a_dictionary_thaws_or_gives_no_value() -> None:
    methods = {name for name in dir(dict) if callable(getattr(dict, name)) and not hasattr(object, name)}
    methods |= {"__eq__", "__ne__", "__repr__", "__reduce_ex__"}
    own = {name for name in methods if name in vars(Thawing)}
    assert methods - own - _HARMLESS == {"__class_getitem__"}


def _updated(layer: PanelLinear) -> object:
    made: dict[str, object] = {}
    made.update(layer._parameters)
    return made["weight"]


READINGS: dict[str, Callable[[PanelLinear], object]] = {
    "attribute": lambda layer: layer.weight,
    "values": lambda layer: next(iter(layer._parameters.values())),
    "items": lambda layer: next(iter(layer._parameters.items()))[1],
    "unpacked": lambda layer: {**layer._parameters}["weight"],
    "dict": lambda layer: dict(layer._parameters)["weight"],
    "merged": lambda layer: (layer._parameters | {})["weight"],
    "merged from the right": lambda layer: ({} | layer._parameters)["weight"],
    "updated": _updated,
    "state_dict": lambda layer: layer.state_dict()["weight"],
    "deepcopy": lambda layer: copy.deepcopy(layer).weight,
    "pickle": lambda layer: pickle.loads(pickle.dumps(layer)).weight,
    "popped": lambda layer: copy.copy(layer._parameters).pop("weight"),
}


@pytest.mark.parametrize("read", READINGS.values(), ids=READINGS.keys())
def test_the_weight_is_what_it_was_bit_for_bit(read: Callable[[PanelLinear], Any]) -> None:
    layer, weight, rows = _packed()
    expected = _run(layer, rows)
    found = read(layer)
    assert torch.equal(found, weight)
    del found
    assert torch.equal(_run(layer, rows), expected)


def test_saved_files_hold_plain_tensors() -> None:
    layer, weight, rows = _packed()
    file = io.BytesIO()
    torch.save(layer.state_dict(), file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True)["weight"], weight)
    assert b"Thawing" not in pickle.dumps(layer)
    again = pickle.loads(pickle.dumps(layer))
    assert torch.equal(_run(again, rows), _run(layer, rows))


@needs_numpy
def test_the_plain_weight_is_dropped_unless_somebody_holds_it() -> None:
    layer, _, rows = _packed()
    for held in (layer.weight, layer.weight.detach(), layer.weight.view(-1)[3:], layer.weight.detach().numpy()):
        _run(layer, rows)
        assert not _frozen(layer._parameters)
        del held
    gc.collect()
    _run(layer, rows)
    assert _frozen(layer._parameters)


def test_a_weight_in_a_graph_of_autograd_is_held() -> None:
    layer, _, rows = _packed()
    result = layer(rows).sum()
    _run(layer, rows)
    assert not _frozen(layer._parameters)
    result.backward()
    _run(layer, rows)
    assert not _frozen(layer._parameters)  # its gradient would be lost
    assert layer.weight.grad is not None


@pytest.mark.parametrize(
    "change",
    [
        lambda weight: weight.mul_(2),
        lambda weight: weight.data.mul_(2),
        lambda weight: weight.copy_(weight * 2),
        lambda weight: weight.set_(weight.detach() * 2),
        pytest.param(lambda weight: weight.detach().numpy().__imul__(2), marks=needs_numpy),
    ],
)
def test_changes_by_who_holds_it_are_seen(change: Callable[[Tensor], object]) -> None:
    layer, weight, rows = _packed(bias=False)
    before, held = _run(layer, rows), layer.weight
    assert torch.equal(_run(layer, rows), before)
    with torch.no_grad():
        change(held)
    torch.testing.assert_close(_run(layer, rows), before * 2)
    del held
    assert torch.equal(layer.weight, weight * 2)
    torch.testing.assert_close(_run(layer, rows), before * 2)


def test_looking_at_a_weight_packs_nothing_again() -> None:
    layer, weight, rows = _packed()
    packed = layer.panels
    for _ in range(3):
        assert torch.equal(layer.state_dict()["weight"], weight)
        _run(layer, rows)
        assert layer.panels is packed
        assert _frozen(layer._parameters)


def test_a_change_that_nothing_shows_needs_refresh() -> None:
    layer, _, rows = _packed(bias=False)
    layer.weight.data[7, 5] += 100.0
    refresh(layer)
    torch.testing.assert_close(_run(layer, rows), rows @ layer.weight.T)


def test_a_number_written_unseen_is_not_lost() -> None:
    layer, rows = PanelLinear(64, 64).eval(), torch.randn(3, 64)
    _run(layer, rows)
    layer.weight.data[5, 7] += 100.0
    found = _run(layer, rows)
    assert layer.weight[5, 7] == 100.0
    torch.testing.assert_close(found[:, 5], rows[:, 7] * 100.0)


def test_bias_and_norm_are_read_at_each_call() -> None:
    layer, _, rows = _packed(norm=("layer", 1e-5), norm_weight=True, norm_bias=True)
    with torch.no_grad():
        for key in ("bias", "norm_weight", "norm_bias"):
            getattr(layer, key).add_(1.0)
            torch.testing.assert_close(_run(layer, rows), layer._plain(rows, None))


@pytest.mark.parametrize("swaps", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_conversions(dtype: torch.dtype, swaps: bool) -> None:
    layer, weight, rows = _packed()
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(swaps)
    try:
        layer.to(dtype)
        assert layer.weight.dtype == dtype
        assert torch.equal(layer.weight, weight.to(dtype))
        found = _run(layer, rows.to(dtype))
        assert found.dtype == dtype
        torch.testing.assert_close(found, nn.functional.linear(rows.to(dtype), layer.weight, layer.bias))
        layer.float()
        torch.testing.assert_close(_run(layer, rows), nn.functional.linear(rows, layer.weight, layer.bias))
    finally:
        torch.__future__.set_swap_module_params_on_conversion(before)


def test_flags_and_attributes_stay() -> None:
    layer = _layer()
    layer.requires_grad_(False)
    layer.weight.note = "kept"
    rows = torch.randn(2, 12)
    layer(rows)
    assert _frozen(layer._parameters)
    assert not layer.weight.requires_grad and layer.weight.note == "kept"
    layer(rows)
    layer.requires_grad_()
    assert layer.weight.requires_grad and layer(rows).requires_grad


def test_other_parameters_by_functional_call_and_vmap() -> None:
    layer, weight, rows = _packed(bias=False)
    found = functional_call(layer, {"weight": weight * 2}, (rows,))
    torch.testing.assert_close(found, rows @ weight.T * 2)
    torch.testing.assert_close(_run(layer, rows), rows @ weight.T)
    torch.testing.assert_close(vmap(layer)(rows), rows @ weight.T)


def test_under_modes_and_other_devices() -> None:
    layer, weight, rows = _packed(bias=False)
    with torch.device("meta"), torch.inference_mode():
        assert torch.equal(layer.weight, weight) and not layer.weight.is_inference()
    meta = copy.deepcopy(layer).to("meta")
    assert meta(rows.to("meta")).is_meta
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(rows).dtype == torch.bfloat16


def test_weights_of_inference_mode_stay_plain() -> None:
    with torch.inference_mode():
        layer = _layer(bias=False)
        found = layer(torch.ones(1, 12))
    torch.testing.assert_close(found, torch.ones(1, 12) @ layer.weight.T)


def test_threads_that_read_and_run() -> None:
    layer, weight, rows = _packed(bias=False)
    expected, wrong = _run(layer, rows), []

    def run() -> None:
        for _ in range(300):
            if not torch.equal(_run(layer, rows), expected) or not torch.equal(layer.weight, weight):
                wrong.append(1)

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_compiled_and_exported() -> None:
    layer, weight, rows = _packed(bias=False)
    model = nn.Sequential(layer)
    program = torch.export.export(model, (rows,))
    assert torch.equal(program.state_dict["0.weight"], weight)
    torch.testing.assert_close(program.module()(rows), rows @ weight.T)
    _run(model, rows)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(_run(compiled, rows), rows @ weight.T)
    with torch.no_grad():
        layer.weight.mul_(2)
    torch.testing.assert_close(_run(compiled, rows), rows @ weight.T * 2)


def test_integers_and_scales() -> None:
    layer = PanelLinear(12, 20, integers=True).eval()
    layer.weight.random_(-127, 128)
    layer.scale.uniform_(0.1, 1.0)
    weight, scale, rows = layer.weight.clone(), layer.scale.clone(), torch.randn(3, 12)
    plain = layer._plain(rows, None)
    with torch.no_grad():
        found = layer(rows)
    assert _frozen(layer._buffers)
    assert nn.functional.cosine_similarity(found, plain).min() > 0.999
    assert torch.equal(layer.state_dict()["weight"], weight) and torch.equal(layer.scale, scale)
    layer.double()
    assert layer.scale.dtype == torch.float32 and layer.weight.dtype == torch.int8
    _run(layer, rows.double())
