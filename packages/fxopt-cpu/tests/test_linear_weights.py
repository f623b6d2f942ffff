"""`FuseLinears` with weights in int8 and bfloat16: which layers, and what becomes of checkpoints, archives and undo."""

from __future__ import annotations

import copy
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_capture import capture, load, save
from fxopt_checkpoints import key_map, load_original_state_dict, original_state_dict
from fxopt_core import FxoptError, NotReversibleError, PassOptionError, compose, history, undo
from fxopt_cpu import FuseLinears, PanelLinear, PlanRegions, calibrated, isa
from fxopt_cpu.passes import matching
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import FORMS, graph_of, refusals, refused, structure
from fxopt_tools.verification.bounds import promise_of

pytestmark = pytest.mark.skipif(isa() is None, reason="the library was not built")
SMALL = FuseLinears(weights="int8", min_weights=1)
KEEPING = FuseLinears(weights="int8", min_weights=1, keep_originals=True)
NARROW = FuseLinears(weights="bfloat16")
has_bfloat16 = isa() in ("avx512bf16", "amx")
for_bfloat16 = pytest.mark.skipif(not has_bfloat16, reason="the processor has no instructions for bfloat16")
X = torch.randn(5, 16)


class Mlp(nn.Module):
    """Three layers, the second without bias."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.down = nn.Linear(16, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 8)

    def forward(self, x: Tensor) -> Any:
        return self.down(F.gelu(self.mid(F.gelu(self.up(x)))))


class Transposed(nn.Module):
    """A weight stored as (in, out)."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(16, 8) / 4), nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Any:
        return torch.addmm(self.bias, x, self.weight)


def layers(graph_module: nn.Module) -> list[PanelLinear]:
    return [module for module in graph_module.modules() if isinstance(module, PanelLinear)]


@torch.no_grad()
def sqnr(found: nn.Module, model: nn.Module, x: Tensor = X) -> float:
    """Signal over error of a graph, in dB."""
    expected = model(x)
    return float(10 * torch.log10(expected.square().sum() / (found(x) - expected).square().sum()))


# --- Which layers


@pytest.mark.parametrize("form", ["functions", "export"])
def test_transposed_weights_are_turned(form: Form) -> None:
    model = Transposed().eval()
    graph_module = SMALL(graph_of(model, form, X), expect=1)
    assert layers(graph_module)[0].weight.shape == (8, 16)
    assert sqnr(graph_module, model) > 35
    load_original_state_dict(graph_module, {key: 2 * value for key, value in model.state_dict().items()})
    model.load_state_dict({key: 2 * value for key, value in model.state_dict().items()})
    assert sqnr(graph_module, model) > 35


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_models_keep_their_dtype(dtype: torch.dtype) -> None:
    model = Mlp().eval().to(dtype)
    graph_module = SMALL(torch.fx.symbolic_trace(model), expect=3)
    x = X.to(dtype)
    with torch.no_grad():
        assert graph_module(x).dtype == dtype
    assert sqnr(graph_module, model, x) > 25


@pytest.mark.parametrize("kwargs", [{}, {"min_weights": 512}, {"keep_last": 1, "min_weights": 1}], ids=str)
def test_layers_of_meta_models_take_no_memory(kwargs: dict[str, Any]) -> None:
    with torch.device("meta"):
        model = Mlp().eval()
    graph_module = FuseLinears(weights="int8", **kwargs)(torch.fx.symbolic_trace(model))
    assert all(tensor.is_meta for tensor in graph_module.state_dict().values())


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"where": "m*"}, [("up", "filtered"), ("down", "filtered")]),
        ({"keep": ("up", "d*")}, [("up", "kept"), ("down", "kept")]),
        ({"keep_first": 1}, [("up", "kept")]),
        ({"keep_last": 2}, [("mid", "kept"), ("down", "kept")]),
        ({"keep_first": 9}, [("up", "kept"), ("mid", "kept"), ("down", "kept")]),
        ({"min_weights": 512}, [("down", "too-small")]),
    ],
    ids=str,
)
def test_options_leave_layers_as_they_are(options: dict[str, Any], left: list[tuple[str, str]]) -> None:
    graph_module = FuseLinears(**{"weights": "int8", "min_weights": 1, **options})(
        torch.fx.symbolic_trace(Mlp().eval())
    )
    assert refused(graph_module) == left
    assert len(layers(graph_module)) == 3 - len(left)


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


@pytest.mark.parametrize("options", [{"keep": "up"}, {"keep_first": -1}, {"keep_last": -2}], ids=str)
def test_impossible_options_are_errors(options: dict[str, Any]) -> None:
    with pytest.raises(PassOptionError, match="keep"):
        FuseLinears(**options)


def test_what_cannot_be_rounded_is_refused() -> None:
    dense = [nn.Linear(4, 4) for _ in range(8)]
    model = nn.Sequential(*dense).eval()
    model[1].weight = model[0].weight
    model[2].register_forward_hook(lambda *_: None)
    model[3] = nn.Linear(4, 4, dtype=torch.float64).eval()
    model[4].train()
    dense[5].weight.data[0, 0] = torch.nan
    nn.utils.parametrizations.weight_norm(model[6])
    graph_module = SMALL(torch.fx.symbolic_trace(model.requires_grad_(False)), expect=1)
    assert dict(refused(graph_module)) == {
        "0": "tied-parameter",
        "1": "tied-parameter",
        "2": "hooks",
        "3": "unsupported-dtype",
        "4": "training",
        "5": "out-of-range",
        "6": "parametrized",
    }
    assert all(f"`{refusal.site}" in refusal.message for refusal in refusals(graph_module))


def test_without_a_library_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "isa", lambda: None)
    assert {reason for _, reason in refused(SMALL(torch.fx.symbolic_trace(Mlp().eval())))} == {"no-kernels"}


# --- Checkpoints, undo


@pytest.mark.parametrize("form", ["modules", "export"])
def test_a_checkpoint_of_the_original_is_quantized_when_it_is_loaded(form: Form) -> None:
    graph_module, other = SMALL(graph_of(Mlp().eval(), form, X)), Mlp().eval()
    load_original_state_dict(graph_module, other.state_dict())
    expected = SMALL(graph_of(other, form, X))
    assert all(
        torch.equal(a, b)
        for a, b in zip(graph_module.state_dict().values(), expected.state_dict().values(), strict=True)
    )
    assert torch.equal(graph_module(X), expected(X))


def test_without_the_originals_there_is_no_way_back() -> None:
    graph_module = SMALL(torch.fx.symbolic_trace(Mlp().eval()))
    with pytest.raises(NotReversibleError, match="keep_originals=True"):
        original_state_dict(graph_module)
    for way in (
        undo,
        lambda module: SMALL(module, reverse=True),
        lambda module: compose(SMALL, SMALL)(module, reverse=True),
    ):
        with pytest.raises(NotReversibleError, match="fuse-linears"):
            way(graph_module)
    assert len(layers(graph_module)) == 3


def test_the_key_map_names_the_arithmetic() -> None:
    (step, *_) = (
        step for step in key_map(SMALL(torch.fx.symbolic_trace(Mlp().eval()))).steps if hasattr(step, "function")
    )
    assert step.function == "fxopt_cpu.operators.linear:quantize"


def test_kept_originals_follow_a_checkpoint() -> None:
    graph_module, other = KEEPING(torch.fx.symbolic_trace(Mlp().eval())), Mlp().eval()
    load_original_state_dict(graph_module, other.state_dict())
    assert sqnr(graph_module, other) > 30
    assert all(torch.equal(value, other.state_dict()[key]) for key, value in original_state_dict(graph_module).items())
    KEEPING(graph_module, reverse=True)
    assert sqnr(graph_module, other) > 100


def test_a_quantized_model_takes_a_quarter_in_files() -> None:
    model = nn.Sequential(nn.Linear(256, 1024, bias=False)).eval()
    graph_module = FuseLinears(weights="int8")(torch.fx.symbolic_trace(model))
    sizes = [sum(t.numel() * t.element_size() for t in m.state_dict().values()) for m in (graph_module, model)]
    assert sizes[0] < 0.26 * sizes[1]


# --- Travel


@pytest.mark.parametrize("transformation", [SMALL, KEEPING], ids=["alone", "keeping"])
def test_copies_pickles_and_archives_compute_the_same(transformation: FuseLinears, tmp_path: Path) -> None:
    graph_module = transformation(capture(Mlp().eval(), (X,)))
    expected = graph_module(X)
    save(graph_module, tmp_path / "quantized.fxopt")
    ways = copy.deepcopy(graph_module), pickle.loads(pickle.dumps(graph_module)), load(tmp_path / "quantized.fxopt")
    for again in ways:
        assert torch.equal(again(X), expected)
        assert len(layers(again)) == 3
        other = Mlp().eval()
        load_original_state_dict(again, other.state_dict())
        assert sqnr(again, other) > 30
        if transformation is KEEPING:
            undo(again)
            assert sqnr(again, other) > 100


@pytest.mark.parametrize("transformation", [SMALL, pytest.param(NARROW, marks=for_bfloat16)], ids=["int8", "bfloat16"])
def test_the_accuracy_is_promised(transformation: FuseLinears) -> None:
    promised = transformation.promised_sqnr
    assert promised is not None and not transformation.preserves_computation
    assert FuseLinears().promised_sqnr is None and FuseLinears().preserves_computation
    model = Mlp().eval()
    graph_module = transformation(GraphModule(model, torch.fx.Tracer().trace(model)))
    assert sqnr(graph_module, model) > promised
    (record,) = history(graph_module)
    assert promise_of(record) == promised
    assert promise_of(replace(record, transformation="elsewhere:Pass")) is None


# --- bfloat16


@for_bfloat16
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", [Mlp, Transposed])
def test_weights_in_bfloat16(form: Form, model: type[nn.Module]) -> None:
    """Biases, inputs and results stay in float32; checkpoints are rounded when loaded; originals are kept if asked."""
    found, other = model().eval(), model().eval()
    graph_module = NARROW(graph_of(found, form, X))
    for layer in layers(graph_module):
        assert layer.weight.dtype is torch.bfloat16 and (layer.bias is None or layer.bias.dtype is torch.float32)
    assert graph_module(X).dtype is torch.float32
    assert sqnr(graph_module, found) > 40
    load_original_state_dict(graph_module, other.state_dict())
    assert sqnr(graph_module, other) > 40
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


@torch.no_grad()
def test_zero_weights_and_zero_inputs_are_exact() -> None:
    layer = nn.Linear(64, 96).eval()
    layer.weight[3] = 0.0
    model = nn.Sequential(layer)
    graph_module = SMALL(torch.fx.symbolic_trace(model))
    assert torch.equal(graph_module(torch.zeros(2, 64)), model(torch.zeros(2, 64)))
    assert torch.equal(graph_module(torch.ones(2, 64))[:, 3], model(torch.ones(2, 64))[:, 3])


@torch.no_grad()
def test_a_changed_weight_is_rounded_anew_in_a_plan_too() -> None:
    model = Mlp().eval()
    graph_module = PlanRegions()(SMALL(graph_of(model, "modules", X)))
    before = graph_module(X)
    for layer in layers(graph_module):
        layer.scale.mul_(2)
    assert not torch.equal(graph_module(X), before)
    for layer in layers(graph_module):
        layer.scale.div_(2)
    assert torch.equal(graph_module(X), before)


STATIC = FuseLinears(weights="int8", min_weights=1, activations="static")
UNEVEN = torch.randn(400, 16) * torch.logspace(-1, 1.5, 16) + torch.randn(16) * 3
"""Inputs of which some elements are large in all rows, as in transformers."""


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("model", [Mlp, Transposed])
def test_static_ranges_are_those_of_the_calls(form: Form, model: type[nn.Module]) -> None:
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
    class Named(nn.Module):
        least: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(16, 32)
            self.register_buffer("least", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            weight, bias = self.layer.weight, self.layer.bias
            return nn.functional.linear(weight=weight, bias=bias, input=torch.maximum(self.least, x))

    model = Named().eval()
    graph_module = torch.fx.symbolic_trace(model)
    with calibrated(graph_module, [UNEVEN]):
        graph_module = STATIC(graph_module, expect=1)
    assert sqnr(graph_module, model, UNEVEN) > 30


def test_static_ranges_need_calls_that_reach_the_layer() -> None:
    with pytest.raises(FxoptError, match="needs data to calibrate with"):
        STATIC(graph_of(Mlp().eval(), "modules", X))
    graph_module = graph_of(Mlp().eval(), "modules", X)
    with calibrated(graph_module, [torch.full((1, 16), torch.inf)]):
        assert {refusal.reason for refusal in refusals(STATIC(graph_module))} == {"no-range"}
    with pytest.raises(FxoptError, match="a call to calibrate with is"), calibrated(graph_module, [3]):
        pass
    with pytest.raises(PassOptionError, match="'dynamic' or 'static'"):
        FuseLinears(activations="fixed")


def test_static_layers_are_saved_and_copied_and_refuse_other_weights(tmp_path: Path) -> None:
    model = Mlp().eval()
    graph_module = capture(model, (X,))
    with calibrated(graph_module, [X]):
        graph_module = STATIC(graph_module)
    expected = graph_module(X)
    save(graph_module, tmp_path / "static.fxopt")
    for other in (
        load(tmp_path / "static.fxopt"),
        copy.deepcopy(graph_module),
        pickle.loads(pickle.dumps(graph_module)),
    ):
        assert torch.equal(other(X), expected)
    with pytest.raises(FxoptError, match="ranges that were found with the former weights"):
        load_original_state_dict(graph_module, model.state_dict())
    graph_module = capture(model, (X,))
    with calibrated(graph_module, [X]):
        FuseLinears(weights="int8", min_weights=1, activations="static", keep_originals=True)(graph_module)
    undo(graph_module)
    assert torch.equal(graph_module(X), model(X))
