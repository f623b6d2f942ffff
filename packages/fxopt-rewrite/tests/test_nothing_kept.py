"""What a run held is free when it is over, without waiting for the garbage collector."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import Instrument, instrumented
from fxopt_rewrite import (
    Editor,
    GraphIndex,
    Site,
    SitePass,
    read_linear,
)


class Layers(nn.Module):
    """Two layers, and a parameter with a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.gradient = nn.Parameter(torch.zeros(4))
        self.gradient.grad = torch.ones(4)

    def forward(self, x: Tensor) -> Any:
        return self.first(x) + self.second(x) + self.gradient


class WithoutLayers(SitePass[Site]):
    """Takes linear layers out, and what stands for them is their input."""

    preserves_computation = False

    def match(self, index: GraphIndex) -> Iterator[Site]:
        """Yield every layer; ask for what a pass asks of an index."""
        for node in index.nodes:
            call = read_linear(index, node)
            if call is not None:
                index.effects.written_between(node, node, index.nodes[-1])
                index.readers(next(index.graph_module.parameters()))
                yield _Layer(str(node.target), (node,))

    def rewrite(self, site: Site, edit: Editor) -> None:
        """Let its input stand for a layer."""
        (node,) = site.nodes
        value = edit.call_function(torch.neg, node.args[0], before=node, like=[node])
        edit.replace(node, value)
        edit.drop_module(site.label, {})


class _Layer:
    def __init__(self, label: str, nodes: tuple[torch.fx.Node, ...]) -> None:
        self.label, self.nodes = label, nodes


@pytest.fixture(autouse=True)
def without_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def references(graph_module: GraphModule) -> dict[str, weakref.ref[object]]:
    """Weak references to the modules and storages of a graph module."""
    found: dict[str, weakref.ref[object]] = {name: weakref.ref(m) for name, m in graph_module.named_modules() if name}
    return found | {name: weakref.ref(tensor) for name, tensor in graph_module.named_parameters()}


def traced() -> GraphModule:
    graph_module = symbolic_trace(Layers())
    gc.collect()  # tracing leaves the model in a cycle
    return graph_module


def alive(found: dict[str, weakref.ref[object]]) -> list[str]:
    return [name for name, reference in found.items() if reference() is not None]


def test_what_a_pass_takes_out_is_freed() -> None:
    graph_module = traced()
    found = references(graph_module)
    WithoutLayers()(graph_module, expect=2)
    assert alive(found) == ["gradient"]


def test_so_it_is_where_an_instrument_might_have_vetoed() -> None:
    graph_module = traced()
    found = references(graph_module)
    with instrumented(Vetoing()):
        WithoutLayers()(graph_module, expect=2)
    assert alive(found) == ["gradient"]


class Vetoing(Instrument):
    def after_pass(self, *seen: object) -> None:
        return None
