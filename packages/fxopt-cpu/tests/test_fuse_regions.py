"""`FuseRegions`: one program for a region where nothing has changed, and its nodes one by one everywhere else."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from onednn_forms import assert_computes, check, packed
from region_models import Net, X, prepared
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_core import ReversibleTransformation, compose, history, undo
from fxopt_cpu import FuseConvolutions, FuseRegions
from fxopt_cpu.programs import dispatch, programs
from fxopt_cpu.programs.dispatch import programs_of
from fxopt_cpu.programs.fuse_regions import Fusing
from fxopt_rewrite.branches import is_branching
from fxopt_testing.rewrites import graph_of, structure


@pytest.fixture(autouse=True)
def programs_always_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no clock decide in a test."""
    monkeypatch.setattr(programs._Attempt, "_fastest", lambda self, programs: programs[0] if programs else None)


@pytest.fixture
def net() -> tuple[nn.Module, GraphModule, Tensor]:
    """A model, its graph with a program, and an input."""
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(X)
    graph_module = prepared(model, x)
    with torch.no_grad():
        for _ in range(2):
            graph_module(x)
    assert len(programs_of(graph_module)) == 1
    return model, graph_module, x


def test_results_effects_gradients_and_undo() -> None:
    x = torch.randn(X)
    model = Net().eval()
    passes = compose(FuseConvolutions(), FuseRegions())
    assert isinstance(passes, ReversibleTransformation)
    others = [(torch.randn(batch, *X[1:]),) for batch in (1, 0)]
    graph_module = check(passes, model, x, sites=5, others=others)
    assert is_branching(graph_module.graph, Fusing)


@torch.no_grad()
def test_a_program_takes_the_place_of_the_layers_at_the_second_call() -> None:
    model, x = Net().eval(), torch.randn(X)
    graph_module = prepared(model, x)
    for count in (0, 1, 1):
        assert_computes(graph_module, model, x)
        assert len(programs_of(graph_module)) == count
    assert all(layer.packing.is_empty for layer in packed(graph_module))
    assert "oneDNNFusionGroup" in str(programs_of(graph_module)[0].graph_for(x))  # type: ignore[attr-defined]  # of TorchScript
    with torch.inference_mode():
        torch.testing.assert_close(graph_module(x), model(x))


def replace_bias(graph_module: GraphModule) -> None:
    packed(graph_module)[0].bias = nn.Parameter(torch.randn(8))


def replace_layer(graph_module: GraphModule) -> None:
    graph_module.add_module("pool", nn.AdaptiveMaxPool2d(1).eval())


def set_hook(graph_module: GraphModule) -> None:
    packed(graph_module)[1].register_forward_hook(lambda module, args, output: output * 0)


def set_pre_hook(graph_module: GraphModule) -> None:
    packed(graph_module)[0].register_forward_pre_hook(lambda module, args: (args[0] * 0,))


def override_forward(graph_module: GraphModule) -> None:
    layer = packed(graph_module)[-1]
    vars(layer)["forward"] = lambda x: torch.ones(len(x), 5)


CHANGES: dict[str, Callable[[GraphModule], object]] = {
    "weight in place": lambda g: packed(g)[0].weight.mul_(2),
    "bias in place": lambda g: g.get_parameter("head_packed.bias").add_(1),
    "weight replaced": lambda g: setattr(packed(g)[1], "weight", nn.Parameter(torch.randn(8, 1, 3, 3))),
    "bias replaced": replace_bias,
    "data replaced": lambda g: setattr(packed(g)[0].weight, "data", torch.randn(8, 3, 3, 3)),
    "state loaded": lambda g: g.load_state_dict({key: value + 1 for key, value in g.state_dict().items()}),
    "layer replaced": replace_layer,
    "hook": set_hook,
    "pre-hook": set_pre_hook,
    "forward": override_forward,
    "attribute": lambda g: setattr(g.get_submodule("pool"), "output_size", (1, 1)),
    "global hook": lambda g: None,
}  # fmt: skip


@pytest.mark.parametrize("change", CHANGES)
@torch.no_grad()
def test_whatever_is_changed_is_noticed(change: str, net: tuple[nn.Module, GraphModule, Tensor]) -> None:
    graph_module, x = net[1:]
    handles = []
    if change == "global hook":
        handles = [nn.modules.module.register_module_forward_hook(lambda module, args, output: None)]
    try:
        before = graph_module(x)
        CHANGES[change](graph_module)
        expected = plainly(graph_module, x)
        assert change in ("attribute", "global hook") or not torch.allclose(before, expected)
        for _ in range(6):
            torch.testing.assert_close(graph_module(x), expected)
    finally:
        for handle in handles:
            handle.remove()
    watched = change in ("hook", "pre-hook", "forward", "global hook")
    assert len(programs_of(graph_module)) == (not watched)


def plainly(graph_module: GraphModule, x: Tensor) -> Tensor:
    """Return what the nodes compute."""
    result: Tensor = torch.fx.Interpreter(graph_module).run(x)
    return result


@torch.no_grad()
def test_kinds_of_input_have_programs_of_their_own(net: tuple[nn.Module, GraphModule, Tensor]) -> None:
    model, graph_module, x = net
    last = x.contiguous(memory_format=torch.channels_last)
    kinds = [last, torch.randn(1, 3, 12, 10), torch.randn(2, 3, 20, 10), torch.randn(2, 3, 10, 12)]
    for count, each in enumerate((x, *kinds)):
        for _ in range(20):
            assert_computes(graph_module, model, each)
        assert len(programs_of(graph_module)) == count % dispatch._MOST_PROGRAMS + 1
    wide = copy.deepcopy(graph_module).double()
    assert_computes(wide, copy.deepcopy(model).double(), x.double())
    for _ in range(3):
        assert_computes(graph_module, model, torch.randn(0, 3, 12, 10))


@torch.no_grad()
def test_kinds_that_hardly_repeat_are_not_worth_a_program(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[object] = []
    monkeypatch.setattr(dispatch, "make_program", lambda *args: made.append(args))
    model, x = Net().eval(), torch.randn(X)
    graph_module = prepared(model, x)
    for _ in range(2):
        for height in range(8, 28):
            graph_module(torch.randn(1, 3, height, 8))
    assert len(made) == 1
    assert_computes(graph_module, model, x)


def test_gradients_are_those_of_the_layers(net: tuple[nn.Module, GraphModule, Tensor]) -> None:
    model, graph_module, x = net
    for each in (model, graph_module):
        each(x).square().sum().backward()
    torch.testing.assert_close(packed(graph_module)[0].weight.grad, model.get_parameter("stem.weight").grad)


@pytest.mark.parametrize("again", [copy.deepcopy, lambda g: pickle.loads(pickle.dumps(g))], ids=["copy", "pickle"])
@torch.no_grad()
def test_copies_have_programs_of_their_own(
    again: Callable[[GraphModule], GraphModule], net: tuple[nn.Module, GraphModule, Tensor]
) -> None:
    model, graph_module, x = net
    twin = again(graph_module)
    assert twin.code == graph_module.code
    assert not programs_of(twin)
    for _ in range(2):
        assert_computes(twin, model, x)
    assert len(programs_of(twin)) == 1
    for parameter in twin.parameters():
        parameter.zero_()
    assert_computes(graph_module, model, x)
    assert not twin(x).any()
    faithful = compose(FuseRegions(), inplace=False)(graph_module)
    for parameter in faithful.parameters():
        parameter.zero_()
    assert not faithful(x).any()
    assert_computes(graph_module, model, x)


@torch.no_grad()
def test_saved_is_what_was_saved_before(net: tuple[nn.Module, GraphModule, Tensor]) -> None:
    model, graph_module, _ = net
    assert sorted(graph_module.state_dict()) == sorted(key.replace(".", "_packed.") for key in model.state_dict())
    buffer = io.BytesIO()
    torch.save(graph_module, buffer)
    assert len(buffer.getvalue()) < 40_000


@torch.no_grad()
def test_undo_gives_the_code_back() -> None:
    x = torch.randn(X)
    graph_module = FuseConvolutions()(graph_of(Net().eval(), "modules", x))
    before, code, generator = structure(graph_module), graph_module.code, type(graph_module.graph._codegen)
    for backwards in (undo, lambda g: FuseRegions()(g, reverse=True)):
        FuseRegions()(graph_module)
        assert history(graph_module)[-1].rewrites
        assert "run_region" in graph_module.code
        for _ in range(2):
            graph_module(x)
        assert programs_of(graph_module)
        backwards(graph_module)
        assert structure(graph_module) == before
        assert (graph_module.code, type(graph_module.graph._codegen)) == (code, generator)
        graph_module(x)


def test_graphs_without_packed_convolutions_stay_as_they_are() -> None:
    graph_module = graph_of(Net().eval(), "modules", torch.randn(X))
    code = graph_module.code
    FuseRegions()(graph_module)
    assert graph_module.code == code
    assert not history(graph_module)[-1].changed


@torch.no_grad()
def test_a_graph_that_was_edited_runs_as_it_was_compiled(net: tuple[nn.Module, GraphModule, Tensor]) -> None:
    model, graph_module, x = net
    multiplied = next(node for node in graph_module.graph.nodes if "mul" in node.name)
    multiplied.args = (multiplied.args[0], 3)
    for _ in range(3):
        assert_computes(graph_module, model, x)
    graph_module.recompile()
    expected = plainly(graph_module, x)
    for _ in range(3):
        torch.testing.assert_close(graph_module(x), expected)
    assert len(programs_of(graph_module)) == 1


@torch.no_grad()
def test_threads_may_call_at_once(net: tuple[nn.Module, GraphModule, Tensor]) -> None:
    model, graph_module, _ = net
    graph_module.recompile()
    inputs = [torch.randn(X) for _ in range(4)]
    wrong: list[int] = []

    def call(place: int) -> None:
        with torch.no_grad():
            expected = model(inputs[place])
            for _ in range(40):
                if not torch.allclose(graph_module(inputs[place]), expected, atol=1e-5):
                    wrong.append(place)

    threads = [threading.Thread(target=call, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert programs_of(graph_module)


def test_nothing_keeps_a_graph_module_alive() -> None:
    x = torch.randn(X)
    graph_module = prepared(Net().eval(), x)
    with torch.no_grad():
        for _ in range(2):
            graph_module(x)
    assert programs_of(graph_module)
    alive = weakref.ref(graph_module)
    del graph_module
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("way", ["compile", "export", "strict export", "fx", "autocast", "vmap"])
@torch.no_grad()
def test_what_watches_sees_the_nodes(way: str, net: tuple[nn.Module, GraphModule, Tensor]) -> None:
    model, graph_module, x = net
    ways: dict[str, Callable[[], Any]] = {
        "compile": lambda: torch.compile(graph_module, backend="eager", fullgraph=True)(x),
        "export": lambda: torch.export.export(graph_module, (x,), strict=False).module()(x),
        "strict export": lambda: torch.export.export(graph_module, (x,), strict=True).module()(x),
        "fx": lambda: torch.fx.symbolic_trace(graph_module)(x),
        "autocast": lambda: under_autocast(graph_module, x),
        "vmap": lambda: torch.vmap(graph_module)(x[None])[0],
    }
    tolerance = 5e-2 if way == "autocast" else 1e-5
    torch.testing.assert_close(ways[way](), model(x), rtol=tolerance, atol=tolerance)


def under_autocast(graph_module: GraphModule, x: Tensor) -> Tensor:
    with torch.autocast("cpu"):
        result: Tensor = graph_module(x).float()
    return result
