"""`FuseLinears` with weights in int8 and bfloat16: which layers, and what becomes of checkpoints, archives and undo."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from low_precision_models import Mlp, layers, sqnr
from site_passes import Computes
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_capture import capture, load, save
from fxopt_checkpoints import load_original_state_dict, original_state_dict
from fxopt_core import NotReversibleError, history, undo
from fxopt_cpu import FuseLinears, calibrated, isa
from fxopt_testing.forms import TRACED, Form
from fxopt_testing.rewrites import graph_of, refused, structure
from fxopt_tools.verification.bounds import promise_of

pytestmark = pytest.mark.skipif(isa() is None, reason="the library was not built")
# By day, dynamic sizes stand for fixed ones.
FORMS = [*TRACED, "export-dynamic", pytest.param("export", marks=pytest.mark.nightly)]
SMALL = FuseLinears(weights="int8", min_weights=1)
NARROW = FuseLinears(weights="bfloat16")
has_bfloat16 = isa() in ("avx512bf16", "amx")
for_bfloat16 = pytest.mark.skipif(not has_bfloat16, reason="the processor has no instructions for bfloat16")
X = torch.randn(5, 16)


def transposed() -> Computes:
    """A weight stored as (in, out)."""
    weight, bias = nn.Parameter(torch.randn(16, 8) / 4), nn.Parameter(torch.randn(8))
    return Computes(lambda m, x: torch.addmm(m.bias, x, m.weight), weight=weight, bias=bias)


# --- Which layers


@pytest.mark.parametrize("form", ["functions", "export"])
def test_transposed_weights_are_turned(form: Form) -> None:
    model = transposed().eval()
    graph_module = SMALL(graph_of(model, form, X), expect=1)
    assert layers(graph_module)[0].weight.shape == (8, 16)
    assert sqnr(graph_module, model, X) > 35
    load_original_state_dict(graph_module, {key: 2 * value for key, value in model.state_dict().items()})
    model.load_state_dict({key: 2 * value for key, value in model.state_dict().items()})
    assert sqnr(graph_module, model, X) > 35


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_models_keep_their_dtype(dtype: torch.dtype) -> None:
    model = Mlp().eval().to(dtype)
    graph_module = SMALL(torch.fx.symbolic_trace(model), expect=3)
    x = X.to(dtype)
    with torch.no_grad():
        assert graph_module(x).dtype == dtype
    assert sqnr(graph_module, model, x) > 25


def test_an_outlier_in_one_row_leaves_the_others_as_they_are(tmp_path: Path) -> None:
    model = Mlp().eval()
    graph_module, x = FuseLinears(weights="int8", min_weights=1)(capture(model, (X,))), X.clone()
    with torch.no_grad():
        before = graph_module(x)
        x[0, 0] = 1e5
        assert torch.equal(graph_module(x)[1:], before[1:])
    small = X * torch.logspace(-3, 0, len(X)).unsqueeze(1)
    assert sqnr(graph_module, model, small[:1]) > 30
    save(graph_module, tmp_path / "rows.fxopt")
    assert torch.equal(load(tmp_path / "rows.fxopt")(x), graph_module(x))


def test_a_quantized_model_takes_a_quarter_in_files() -> None:
    model = nn.Sequential(nn.Linear(256, 1024, bias=False)).eval()
    graph_module = FuseLinears(weights="int8")(torch.fx.symbolic_trace(model))
    sizes = [sum(t.numel() * t.element_size() for t in m.state_dict().values()) for m in (graph_module, model)]
    assert sizes[0] < 0.26 * sizes[1]


@pytest.mark.parametrize("transformation", [SMALL, pytest.param(NARROW, marks=for_bfloat16)], ids=["int8", "bfloat16"])
def test_the_accuracy_is_promised(transformation: FuseLinears) -> None:
    promised = transformation.promised_sqnr
    assert promised is not None and not transformation.preserves_computation
    assert FuseLinears().promised_sqnr is None and FuseLinears().preserves_computation
    model = Mlp().eval()
    graph_module = transformation(GraphModule(model, torch.fx.Tracer().trace(model)))
    assert sqnr(graph_module, model, X) > promised
    (record,) = history(graph_module)
    assert promise_of(record) == promised
    assert promise_of(replace(record, transformation="elsewhere:Pass")) is None


# --- bfloat16


@for_bfloat16
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", [Mlp, transposed])
def test_weights_in_bfloat16(form: Form, model: Callable[[], nn.Module]) -> None:
    """Biases, inputs and results stay in float32; checkpoints are rounded when loaded; originals are kept if asked."""
    found, other = model().eval(), model().eval()
    graph_module = NARROW(graph_of(found, form, X))
    for layer in layers(graph_module):
        assert layer.weight.dtype is torch.bfloat16 and (layer.bias is None or layer.bias.dtype is torch.float32)
    assert graph_module(X).dtype is torch.float32
    assert sqnr(graph_module, found, X) > 40
    load_original_state_dict(graph_module, other.state_dict())
    assert sqnr(graph_module, other, X) > 40
    with pytest.raises(NotReversibleError, match="fuse-linears"):
        undo(graph_module)
    graph_module = graph_of(found, form, X)
    before = structure(graph_module)
    FuseLinears(weights="bfloat16", keep_originals=True)(graph_module)
    assert all(torch.equal(value, found.state_dict()[key]) for key, value in original_state_dict(graph_module).items())
    undo(graph_module)
    assert structure(graph_module) == before


@for_bfloat16
def test_layers_in_bfloat16_already_and_masks_stay_as_they_are() -> None:
    graph_module = NARROW(torch.fx.symbolic_trace(Mlp().eval().bfloat16()), expect=0)
    assert {reason for _, reason in refused(graph_module)} == {"unsupported-dtype"}


@for_bfloat16
def test_gradients_reach_the_input_of_layers_in_bfloat16() -> None:
    x = X.clone().requires_grad_()
    NARROW(graph_of(Mlp().eval(), "modules", X))(x).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.float32


# --- What reaches a layer


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_a_value_that_is_not_finite_stays_in_its_row(value: float) -> None:
    model = Mlp().eval()
    graph_module, x = SMALL(torch.fx.symbolic_trace(model)), X.clone()
    with torch.no_grad():
        before = graph_module(X)
        x[1, 2] = value
        found = graph_module(x)
        assert not found[1].isfinite().any()
        assert torch.equal(found[[0, 2, 3, 4]], before[[0, 2, 3, 4]])
        assert model(x)[1].isnan().tolist() == found[1].isnan().tolist()


@torch.no_grad()
def test_the_largest_products_do_not_saturate() -> None:
    layer = nn.Linear(64, 96).eval()
    layer.weight.fill_(1.0)
    found = SMALL(torch.fx.symbolic_trace(nn.Sequential(layer)))(torch.full((8, 64), 3.0))
    torch.testing.assert_close(found, layer(torch.full((8, 64), 3.0)), rtol=1e-3, atol=1e-3)


STATIC = FuseLinears(weights="int8", min_weights=1, activations="static")
UNEVEN = torch.randn(400, 16) * torch.logspace(-1, 1.5, 16) + torch.randn(16) * 3
"""Inputs of which some elements are large in all rows, as in transformers."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", [Mlp, transposed])
def test_static_ranges_are_those_of_the_calls(form: Form, model: Callable[[], nn.Module]) -> None:
    """Merged or not, each layer by what reaches it; no row changes another, and what lies beyond is cut off."""
    torch.manual_seed(0)
    found = model().eval()
    graph_module = graph_of(found, form, UNEVEN)
    with calibrated(graph_module, [UNEVEN, (UNEVEN.flip(0),)]):
        graph_module = STATIC(graph_module)
    assert all(hasattr(layer, "rounding") for layer in layers(graph_module))
    assert "fxopt_calibration" not in graph_module.meta
    assert sqnr(graph_module, found, UNEVEN) > 30
    with torch.no_grad():
        alone = torch.where(torch.arange(400)[:, None] < 3, UNEVEN, 1e6)
        assert torch.equal(graph_module(UNEVEN)[:3], graph_module(alone)[:3])
        assert graph_module(alone).abs().max() < 1e4
        assert graph_module(torch.full_like(UNEVEN, torch.nan)).isnan().all()


def test_ranges_are_noted_beside_single_numbers_and_of_arguments_in_any_order() -> None:
    def function(m: Any, x: Tensor) -> Any:
        return nn.functional.linear(weight=m.layer.weight, bias=m.layer.bias, input=torch.maximum(m.least, x))

    model = Computes(function, layer=nn.Linear(16, 32)).eval()
    model.register_buffer("least", torch.zeros(()))
    graph_module = torch.fx.symbolic_trace(model)
    with calibrated(graph_module, [UNEVEN, UNEVEN]):
        graph_module = STATIC(graph_module, expect=1)
    assert sqnr(graph_module, model, UNEVEN) > 30
