"""Whatever changes about a region of layers is seen by the next call, which asks for one number."""

from __future__ import annotations

import copy
import gc
import io
import sys
import threading
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from region_plans import plans_of
from torch import Tensor, nn
from torch.func import functional_call
from torch.fx import GraphModule, Interpreter
from torch.nn.modules.module import register_module_forward_hook
from torch.utils import swap_tensors

from fxopt_capture import capture, load, save
from fxopt_core import (
    Transformation,
    faithful_copy,
    latest_change,
    registry,
    undo,
)
from fxopt_cpu import PackedConv2d, PanelLinear
from fxopt_cpu.library import ISAS, isa
from fxopt_cpu.regions import running

pytestmark = pytest.mark.skipif(isa() not in ISAS[1:], reason="convolutions are planned on processors with AVX2")


class Block(nn.Module):
    """Layers in a name space of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.wide, self.deep = nn.Conv2d(8, 24, 1), nn.Conv2d(24, 24, 3, padding=1, groups=24)
        self.narrow = nn.Conv2d(24, 8, 1, bias=False)

    def forward(self, x: Tensor) -> Any:
        """Return images of the same size."""
        return x + self.narrow(F.relu(self.deep(F.silu(self.wide(x)))))


class Net(nn.Module):
    """Convolutions, linear layers, a norm, and a parameter of the graph."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.block = nn.Conv2d(3, 8, 3, stride=2, padding=1), Block()
        self.head = nn.Sequential(nn.Linear(8, 16), nn.LayerNorm(16), nn.Linear(16, 4))
        self.scale = nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x: Tensor) -> Any:
        """Return numbers for each image."""
        y = self.block(self.stem(x)).mean((2, 3)) * self.scale
        return self.head(y)


def _optimized(model: nn.Module) -> GraphModule:
    return registry().pipeline("cpu-inference")(capture(model, (torch.randn(2, 3, 12, 12),)))


@cache
def _net() -> GraphModule:
    graph_module = _optimized(Net().eval())
    gc.collect()  # what a pass has held is garbage
    return graph_module


def planned() -> tuple[GraphModule, Tensor]:
    """Return a graph module that has run, as one plan and with its weights as panels alone, and its input."""
    torch.manual_seed(0)
    x = torch.randn(2, 3, 12, 12)
    graph_module = copy.deepcopy(_net())
    agree(graph_module, x)
    assert len(plans_of(graph_module)) == 1
    return graph_module, x


def agree(graph_module: GraphModule, x: Tensor) -> Tensor:
    """Compare with the nodes of a copy, one by one, and return the result."""
    with torch.no_grad():
        for _ in range(3):
            found: Tensor = graph_module(x)
        wanted = Interpreter(copy.deepcopy(graph_module)).run(x)
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(graph_module(x), found, rtol=0, atol=0)
    return found


def layers_of(graph_module: GraphModule) -> list[Any]:
    return [each for each in graph_module.modules() if isinstance(each, PanelLinear | PackedConv2d)]


def layer_of(graph_module: GraphModule, name: str) -> Any:
    return next(each for full, each in graph_module.named_modules() if full.rpartition(".")[2].startswith(name))


def _numpy(layer: Any) -> None:
    pytest.importorskip("numpy")
    layer.weight.detach().numpy().__imul__(2)


def _doubled(layer: Any) -> dict[str, Tensor]:
    return {key: value * 2 for key, value in layer.state_dict().items()}


def _other_forward(layer: Any) -> None:
    of_class = layer.forward
    layer.forward = lambda *args: of_class(*args) * 2


def _other_class(layer: Any) -> None:
    class Doubled(type(layer)):  # type: ignore[misc]  # whichever it is
        def forward(self, *args: Tensor) -> Any:
            """Return twice the result."""
            return super().forward(*args) * 2

    layer.__class__ = Doubled


def _other_tables(layer: Any) -> None:
    items = layer._parameters.items()
    layer._parameters = {key: None if each is None else nn.Parameter(each * 2) for key, each in items}


CHANGES: dict[str, Callable[[Any], object]] = {
    "in place": lambda layer: layer.weight.mul_(2.0),
    "data": lambda layer: layer.weight.data.mul_(2.0),
    "parameter": lambda layer: setattr(layer, "weight", nn.Parameter(layer.weight * 2)),
    "numpy": _numpy,
    "entry": lambda layer: layer._parameters.__setitem__("weight", nn.Parameter(layer._parameters["weight"] * 2)),
    "loaded": lambda layer: layer.load_state_dict(_doubled(layer)),
    "assigned": lambda layer: layer.load_state_dict(_doubled(layer), assign=True),
    "swapped": lambda layer: swap_tensors(layer.weight, nn.Parameter(layer.weight * 2)),  # type: ignore[no-untyped-call]  # untyped in torch
    "bias": lambda layer: layer.bias.add_(1.0),
    "other bias": lambda layer: setattr(layer, "bias", nn.Parameter(layer.bias + 1.0)),
    "hook": lambda layer: layer.register_forward_hook(lambda module, args, result: result * 2),
    "hook before": lambda layer: layer.register_forward_pre_hook(lambda module, args: (args[0] * 2, *args[1:])),
    "other forward": _other_forward,
    "other class": _other_class,
    "other tables": _other_tables,
}
PAIRS = [(name, change) for change in CHANGES for name in ("deep", "0")]
PAIRS += [(name, change) for name in ("stem", "wide", "2") for change in ("in place", "data", "parameter")]


@torch.no_grad()
@pytest.mark.parametrize(("name", "change"), PAIRS)
def test_changes_of_a_layer(name: str, change: str) -> None:
    graph_module, x = planned()
    assert all(layer.holder.frozen for layer in layers_of(graph_module))
    before = graph_module(x)
    CHANGES[change](layer_of(graph_module, name))
    assert not torch.equal(agree(graph_module, x), before)


@torch.no_grad()
def test_changes_by_who_holds_the_weights() -> None:
    graph_module, x = planned()
    held = [layer.weight for layer in layers_of(graph_module)]
    for weight in held:
        before = agree(graph_module, x)
        assert plans_of(graph_module)
        weight.mul_(2.0)
        assert not torch.equal(agree(graph_module, x), before)
        weight.data.mul_(0.7)
        agree(graph_module, x)
    assert not any(layer.holder.frozen for layer in layers_of(graph_module))
    weight = None
    held.clear()
    for _ in range(20):
        graph_module(x)
    assert all(layer.holder.frozen for layer in layers_of(graph_module))


@torch.no_grad()
@pytest.mark.parametrize("how", ["attribute", "entry", "submodule", "name space", "norm", "parameter", "its entry"])
def test_other_modules_and_parameters_of_the_graph(how: str) -> None:
    graph_module, x = planned()
    block: Any = graph_module.get_submodule("block")
    name = next(key for key in block._modules if key.startswith("deep"))
    other, before = copy.deepcopy(block._modules[name]), graph_module(x)
    other.weight.mul_(2.0)
    if how == "attribute":
        setattr(block, name, other)
    elif how == "entry":
        block._modules[name] = other
    elif how == "submodule":
        graph_module.add_submodule(f"block.{name}", other)
    elif how == "name space":
        graph_module.block = copy.deepcopy(block)
        getattr(graph_module.block, name).weight.mul_(2.0)
    elif how == "norm":
        layer_of(graph_module, "0").norm_weight = nn.Parameter(torch.ones(16) * 2)
    elif how == "parameter":
        graph_module.scale = nn.Parameter(torch.ones(8))
    else:
        graph_module._parameters["scale"] = nn.Parameter(torch.ones(8))
    assert not torch.equal(agree(graph_module, x), before)


@torch.no_grad()
def test_hooks_of_all_modules() -> None:
    graph_module, x = planned()
    before = graph_module(x)
    of_layers = layers_of(graph_module)
    handle = register_module_forward_hook(lambda module, args, result: result * 2 if module in of_layers else None)
    try:
        assert not torch.equal(graph_module(x), before)
    finally:
        handle.remove()
    assert torch.equal(agree(graph_module, x), before)


def _saved_and_loaded(graph_module: GraphModule) -> GraphModule:
    file = io.BytesIO()
    save(graph_module, file)
    file.seek(0)
    return load(file)


@pytest.mark.parametrize("made", [copy.deepcopy, faithful_copy, _saved_and_loaded])
@torch.inference_mode()
def test_what_is_made_in_inference_mode_is_planned_and_trains(made: Callable[[GraphModule], GraphModule]) -> None:
    twin = made(_net())
    twin(torch.randn(2, 3, 12, 12))
    assert len(plans_of(twin)) == 1
    for graph_module in (twin, undo(twin)):
        assert not any(each.is_inference() for each in (*graph_module.parameters(), *graph_module.buffers()))
        assert all(each.requires_grad for each in graph_module.parameters())


def test_training_and_other_parameters_for_one_call() -> None:
    graph_module, x = planned()
    optimizer = torch.optim.SGD(graph_module.parameters(), lr=0.1)
    before = agree(graph_module, x)
    graph_module(x).square().sum().backward()
    optimizer.step()
    assert not torch.equal(agree(graph_module, x), before)
    with torch.no_grad():
        others = {name: each * 2 for name, each in graph_module.named_parameters()}
        found, here = functional_call(graph_module, others, (x,)), agree(graph_module, x)
        assert not torch.equal(found, here)
        twin = copy.deepcopy(graph_module)
        twin.load_state_dict(others)
        torch.testing.assert_close(agree(twin, x), found, rtol=1e-4, atol=1e-5)
        assert torch.equal(graph_module(x), here)


class _Doubling(Transformation):
    """Doubles weights in place, puts other parameters in their places, and then fails."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        with torch.no_grad():
            for layer in layers_of(graph_module):
                layer.weight = nn.Parameter(layer.weight * 2)
            graph_module(torch.zeros(2, 3, 12, 12))
        raise KeyError


@torch.no_grad()
def test_a_rollback_is_seen() -> None:
    graph_module, x = planned()
    before = agree(graph_module, x)
    with pytest.raises(Exception, match="doubling"):
        _Doubling()(graph_module)
    torch.testing.assert_close(agree(graph_module, x), before)


@torch.no_grad()
def test_a_call_compares_layers_only_after_a_change(monkeypatch: pytest.MonkeyPatch) -> None:
    graph_module, x = planned()
    graph_module(x)
    compared: list[object] = []
    compare = running.Unchanged._compare

    def counted(self: running.Unchanged) -> bool:
        compared.append(self)
        return compare(self)

    monkeypatch.setattr(running.Unchanged, "_compare", counted)
    graph_module.eval()  # as some libraries do at each call
    for _ in range(3):
        graph_module(x)
    assert not compared
    graph_module.state_dict()
    for _ in range(3):
        graph_module(x)
    assert len(compared) == 1
    assert all(layer.holder.frozen for layer in layers_of(graph_module))


@torch.no_grad()
def test_a_plan_for_other_sizes_unpacks_nothing() -> None:
    graph_module, x = planned()
    gc.collect()
    graph_module(x)
    assert all(layer.holder.frozen for layer in layers_of(graph_module))
    number = latest_change()
    graph_module(torch.randn(x.shape[0] + 1, *x.shape[1:]))
    assert latest_change() is number


@torch.no_grad()
def test_convolutions_give_their_plain_weights_back() -> None:
    model, x = Net().eval(), torch.randn(2, 3, 12, 12)
    plain = {name: each.clone() for name, each in model.state_dict().items()}
    for last in (torch.contiguous_format, torch.channels_last):
        graph_module = _optimized(copy.deepcopy(model).to(memory_format=last))  # type: ignore[call-overload]
        gc.collect()
        agree(graph_module, x)
        layer = layer_of(graph_module, "deep")
        assert layer.holder.frozen
        strides = layer.weight.stride()
        assert torch.equal(layer.weight, plain["block.deep.weight"])
        agree(graph_module, x)
        assert layer.holder.frozen
        assert layer.weight.stride() == strides
        twin = copy.deepcopy(graph_module)
        assert torch.equal(layer_of(twin, "deep").weight, plain["block.deep.weight"])
        assert torch.equal(twin(x), graph_module(x))


@torch.no_grad()
def test_threads_that_run_after_a_change() -> None:
    """The first of them plans again, and none runs the plan of before meanwhile."""
    graph_module, x = planned()
    head, wrong = layer_of(graph_module, "2"), list[Tensor]()

    def run(start: threading.Barrier, wanted: Tensor) -> None:
        start.wait(60)
        with torch.no_grad():
            wrong.extend(found for found in (graph_module(x) for _ in range(3)) if not torch.equal(found, wanted))

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        for round_ in range(25):
            head.weight.mul_(2 if round_ % 2 else 0.5)
            wanted = copy.deepcopy(graph_module)(x)
            start = threading.Barrier(4)
            threads = [threading.Thread(target=run, args=(start, wanted)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not wrong, round_
    finally:
        sys.setswitchinterval(interval)


@torch.no_grad()
def test_panels_of_before_never_stand_for_a_weight_that_another_thread_has_packed() -> None:
    graph_module, _ = planned()
    for layer in layers_of(graph_module):
        before: Any = layer.packed()
        layer.weight.mul_(2)
        now: Any = layer.packed()
        assert now is not before
        assert now.stands_for(layer.holder, drops=True)
        assert layer.holder.frozen
        assert not before.stands_for(layer.holder, drops=True)
