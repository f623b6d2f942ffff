"""``torch.fx`` traces a captured module into a graph module that computes the same, with the same checks of inputs."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Tracer, symbolic_trace
from torch.fx._symbolic_trace import PH

from fxopt_capture import capture
from fxopt_core import CaptureError

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Layers(nn.Module):
    """Layers, sizes, a buffer that is read, and an input that may be absent."""

    position: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 2)
        self.register_buffer("position", torch.arange(16.0))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        y: Tensor = self.second(torch.relu(self.first(x))).view(-1) + self.position[: 2 * x.shape[0]]
        return y if mask is None else y * mask


class Writing(nn.Module):
    """It writes a buffer, in a call that no input takes part in."""

    calls: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.calls.add_(1)
        return x + self.calls


class Regions(nn.Module):
    """Contexts, and numbers that are drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Any]:
        with torch.no_grad():
            y = torch.sin(x) * self.layer(x)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = x @ x.mT
        return {"y": y + self.layer(x), "z": (z, [torch.rand(x.shape[0])])}


@pytest.fixture(scope="module")
def captured() -> GraphModule:
    """Layers without the input that may be absent."""
    return capture(Layers().eval(), (X,))


def outputs(graph_module: GraphModule, *args: Any) -> list[Tensor]:
    torch.manual_seed(0)
    return list(torch.utils._pytree.tree_leaves(graph_module(*args)))


def assert_same(traced: GraphModule, captured: GraphModule, *args: Any) -> None:
    found, expected = outputs(traced, *args), outputs(captured, *args)
    assert len(found) == len(expected)
    assert all(torch.equal(one, other) and one.dtype == other.dtype for one, other in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:.*regions? of the model")
@pytest.mark.parametrize("make", [Layers, Regions])
def test_it_computes_the_same(make: Callable[[], nn.Module]) -> None:
    captured = capture(make().eval(), (X,))
    traced = symbolic_trace(captured)
    for rows in (X, torch.randn(5, 4)):
        assert_same(traced, captured, rows)
    layers = [name for name, module in captured.named_modules() if isinstance(module, nn.Linear)]
    assert [name for name, module in traced.named_modules() if isinstance(module, nn.Linear)] == layers


def test_inside_of_another_module(captured: GraphModule) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = captured

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.inner(x) + 1
            return y

    outer = Outer()
    traced = symbolic_trace(outer)
    assert torch.equal(traced(X), outer(X))
    assert "inner.first.weight" in traced.state_dict()
    with pytest.raises(CaptureError, match="has size 5 in dimension 1"):
        traced(torch.ones(2, 5))


def test_the_checks_stay_and_travel(captured: GraphModule) -> None:
    traced = symbolic_trace(captured)
    for each in (traced, copy.deepcopy(traced), pickle.loads(pickle.dumps(traced)), symbolic_trace(traced)):
        assert torch.equal(each(X), traced(X))
        with pytest.raises(CaptureError, match="has size 5 in dimension 1"):
            each(torch.ones(2, 5))


def test_writes_are_part_of_the_graph_and_not_done_while_tracing() -> None:
    captured = capture(Writing(), (X,))
    traced = symbolic_trace(captured)
    assert captured.get_buffer("calls") == 0
    assert torch.equal(traced(X), X + 1)
    assert torch.equal(traced(X), X + 2)


def test_an_optional_input_that_was_given() -> None:
    captured = capture(Layers().eval(), (X, torch.tensor(2.0)))
    assert_same(symbolic_trace(captured), captured, X, torch.tensor(3.0))


def test_containers_of_inputs() -> None:
    class Nested(nn.Module):
        def forward(self, pair: tuple[Tensor, Tensor], named: dict[str, Tensor]) -> tuple[Tensor, list[Tensor]]:
            return pair[0] + named["x"], [pair[1]]

    captured = capture(Nested(), ((X, X), {"x": X}))
    traced = symbolic_trace(captured, concrete_args={"pair": (PH, PH), "named": {"x": PH}})
    assert_same(traced, captured, (X, X), {"x": X})


def test_a_tracer_that_goes_into_layers(captured: GraphModule) -> None:
    class Deep(Tracer):
        def is_leaf_module(self, module: nn.Module, name: str) -> bool:
            return False

    graph = Deep().trace(captured)
    assert [node.target for node in graph.nodes if node.op == "call_module"] == ["_guards_fn"]
    assert_same(GraphModule(captured, graph), captured, X)
