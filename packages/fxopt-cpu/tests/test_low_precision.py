"""What `FuseLinears` and `FuseConvolutions` share in int8: which layers, ranges, checkpoints, copies, undo."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from low_precision_models import Mlp, Net, layers, sqnr
from torch import Tensor, nn
from torch.fx import symbolic_trace

from fxopt_capture import capture, load, save
from fxopt_checkpoints import key_map, load_original_state_dict, original_state_dict
from fxopt_core import FxoptError, NotReversibleError, PassOptionError, compose, undo
from fxopt_cpu import FuseConvolutions, FuseLinears, PlanRegions, calibrated, isa
from fxopt_cpu.passes import low_precision, matching
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import graph_of, refusals, refused

pytestmark = pytest.mark.skipif(isa() is None, reason="the library was not built")
INPUTS = {Mlp: torch.randn(5, 16), Net: torch.randn(2, 16, 12, 11)}


@pytest.fixture(autouse=True)
def every_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrite also where float32 is faster, and with ranges of few rows."""
    monkeypatch.setattr(low_precision, "SLOW_IN_INT8", ())
    monkeypatch.setattr(low_precision, "FEWEST_ROWS", 1)


@pytest.fixture(params=[Mlp, Net])
def model(request: pytest.FixtureRequest) -> nn.Module:
    """Linear layers, then convolutions."""
    made: nn.Module = request.param().eval()
    return made


def rounding(model: nn.Module, **options: Any) -> Any:
    """The pass that rounds a model's layers."""
    cls = FuseLinears if isinstance(model, Mlp) else FuseConvolutions
    return cls(**{"weights": "int8", "min_weights": 1, **options})


def inputs(model: nn.Module) -> Tensor:
    return INPUTS[type(model)]


def count(model: nn.Module) -> int:
    """The number of its layers."""
    return len(list(model.children()))


OPTIONS: list[tuple[type[nn.Module], dict[str, Any], list[tuple[str, str]]]] = [
    (Mlp, {"where": "m*"}, [("up", "filtered"), ("down", "filtered")]),
    (Mlp, {"keep": ("up", "d*")}, [("up", "kept"), ("down", "kept")]),
    (Mlp, {"keep_first": 9}, [("up", "kept"), ("mid", "kept"), ("down", "kept")]),
    (Mlp, {"keep_last": 2}, [("mid", "kept"), ("down", "kept")]),
    (Mlp, {"min_weights": 512}, [("down", "too-small")]),
    (Net, {"where": "*o*"}, [("last", "filtered")]),
    (Net, {"keep": ("last", "t*")}, [("two", "kept"), ("last", "kept")]),
    (Net, {"keep_first": 1}, [("one", "kept")]),
    (Net, {"keep_last": 1}, [("last", "kept")]),
    (Net, {"min_weights": 600}, [("short", "too-small")]),
]


@pytest.mark.parametrize(("cls", "options", "left"), OPTIONS, ids=str)
def test_options_leave_layers_as_they_are(cls: Any, options: dict[str, Any], left: list[tuple[str, str]]) -> None:
    model = cls().eval()
    graph_module = rounding(model, **options)(symbolic_trace(model))
    assert [each for each in refused(graph_module) if each[1] in ("kept", "filtered", "too-small")] == left
    assert len(layers(graph_module)) == count(model) - len(left)
    rounding(model, weights="float32")(graph_module, expect=len(left))


IMPOSSIBLE: list[dict[str, Any]] = [
    {"keep": "up"}, {"keep": (3,)}, {"where": None}, {"keep_first": -1}, {"keep_last": -2}, {"weights": "int4"},
    {"activations": "fixed"},
]  # fmt: skip


@pytest.mark.parametrize("options", IMPOSSIBLE, ids=str)
def test_impossible_options_are_errors(model: nn.Module, options: dict[str, Any]) -> None:
    with pytest.raises(PassOptionError, match=r"Fuse\w+ takes"):
        rounding(model, **options)
    with pytest.raises(PassOptionError, match="'dynamic' or 'static'"):
        FuseConvolutions(weights="bfloat16")


def test_layers_of_meta_models_take_no_memory(model: nn.Module) -> None:
    model, x = model.to("meta"), inputs(model).to("meta")
    graph_module = rounding(model)(symbolic_trace(model), expect=count(model))
    assert all(tensor.is_meta for tensor in graph_module.state_dict().values())
    graph_module = symbolic_trace(model)
    with calibrated(graph_module, [x]):
        assert {reason for _, reason in refused(rounding(model, activations="static")(graph_module))} == {"no-range"}


def test_without_a_library_it_says_so(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matching, "isa", lambda: None)
    assert {reason for _, reason in refused(rounding(model)(symbolic_trace(model)))} == {"no-kernels"}


@pytest.mark.parametrize("form", ["modules", "export"])
def test_a_checkpoint_of_the_original_is_quantized_when_it_is_loaded(model: nn.Module, form: Form) -> None:
    x, other = inputs(model), type(model)().eval()
    graph_module, expected = (rounding(model)(graph_of(each, form, x)) for each in (model, other))
    load_original_state_dict(graph_module, other.state_dict())
    assert all(map(torch.equal, graph_module.state_dict().values(), expected.state_dict().values()))
    assert torch.equal(graph_module(x), expected(x))
    made = {step.function.rpartition(":")[2] for step in key_map(graph_module).steps if hasattr(step, "function")}
    assert made == {"quantize"}


def test_without_the_originals_there_is_no_way_back(model: nn.Module) -> None:
    small = rounding(model)
    graph_module = small(symbolic_trace(model))
    with pytest.raises(NotReversibleError, match="keep_originals=True"):
        original_state_dict(graph_module)
    for way in (undo, lambda each: small(each, reverse=True), lambda each: compose(small, small)(each, reverse=True)):
        with pytest.raises(NotReversibleError, match=small.name):
            way(graph_module)
    assert len(layers(graph_module)) == count(model)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (Mlp, {}),
        (Mlp, {"keep_originals": True}),
        (Mlp, {"activations": "static"}),
        (Net, {}),
        (Net, {"activations": "static"}),
    ],
    ids=str,
)
@torch.no_grad()
def test_copies_pickles_and_archives_compute_the_same(
    cls: type[nn.Module], options: dict[str, Any], tmp_path: Path
) -> None:
    model, other = cls().eval(), cls().eval()
    x = inputs(model)
    graph_module = capture(model, (x,), dynamic_shapes=({},))
    with calibrated(graph_module, [x]):
        graph_module = rounding(model, **options)(graph_module)
    expected = graph_module(x)
    save(graph_module, tmp_path / "rounded.fxopt")
    ways = load(tmp_path / "rounded.fxopt"), copy.deepcopy(graph_module), pickle.loads(pickle.dumps(graph_module))
    for again in ways:
        assert torch.equal(again(x), expected)
        planned = PlanRegions()(copy.deepcopy(again))
        assert torch.equal(planned(x), expected)
        assert [layer.weight.dtype for layer in layers(planned)] == [torch.int8] * count(model)
        if "activations" in options:
            pairs = zip(layers(again.bfloat16()), layers(graph_module), strict=True)
            assert all(torch.equal(one.rounding, other.rounding) for one, other in pairs)
            with pytest.raises(FxoptError, match="ranges that were found with the former weights"):
                load_original_state_dict(again, other.state_dict())
            continue
        load_original_state_dict(again, other.state_dict())
        assert sqnr(again, other, x) > 30
        if options:
            kept = original_state_dict(again)
            assert all(torch.equal(value, other.state_dict()[key]) for key, value in kept.items())
            undo(again)
            assert sqnr(again, other, x) > 100


def test_static_ranges_need_calls_that_reach_the_layer(model: nn.Module) -> None:
    static, x = rounding(model, activations="static"), inputs(model)
    with pytest.raises(FxoptError, match="needs data to calibrate with"):
        static(graph_of(model, "modules", x))
    graph_module = graph_of(model, "modules", x)
    with calibrated(graph_module, [torch.full_like(x, torch.inf)]):
        assert {reason for _, reason in refused(static(graph_module))} == {"no-range"}
    with pytest.raises(FxoptError, match="a call to calibrate with is"), calibrated(graph_module, [3]):
        pass


def test_static_ranges_need_rows_of_all_calls_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(low_precision, "FEWEST_ROWS", 512)
    graph_module, calls = symbolic_trace(Mlp().eval()), [INPUTS[Mlp]] * 102
    static = FuseLinears(weights="int8", min_weights=1, activations="static")
    with calibrated(graph_module, calls):
        static(graph_module, expect=0)
        assert "`up` was calibrated with 510 rows, expected 512 or more" in refusals(graph_module)[0].message
    with calibrated(graph_module, [*calls, INPUTS[Mlp][:2]]):
        static(graph_module, expect=3)


def test_static_layers_are_undone_where_the_originals_are_kept(model: nn.Module) -> None:
    x = inputs(model)
    graph_module = graph_of(model, "modules", x)
    with calibrated(graph_module, [x]):
        rounding(model, activations="static", keep_originals=True)(graph_module)
    undo(graph_module)
    assert torch.equal(graph_module(x), model(x))


@pytest.mark.parametrize("planned", [False, True])
@torch.no_grad()
def test_a_changed_scale_is_seen_and_panels_take_the_place_of_the_weight(model: nn.Module, planned: bool) -> None:
    x = inputs(model)
    graph_module = rounding(model)(graph_of(model, "export", x))
    graph_module = PlanRegions()(graph_module) if planned else graph_module
    before = graph_module(x)
    assert torch.equal(graph_module(x), before)
    assert all(layer.holder.frozen for layer in layers(graph_module))
    for layer in layers(graph_module):
        layer.scale.mul_(2)
    assert not torch.equal(graph_module(x), before)
    for layer in layers(graph_module):
        layer.scale.div_(2)
    assert torch.equal(graph_module(x), before)
