"""Graphs that call functions and layers of plugins are saved and loaded; what no plugin offers is refused."""

from __future__ import annotations

import importlib
import io
import pickle
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from hostile_archives import entries_of, packed
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_capture import load, save
from fxopt_capture.archive.module_rows import layer_class
from fxopt_core import CaptureError, Registry, Transformation, history, hookimpl, registry
from fxopt_rewrite import (
    UntrustedNameError,
    plain_name,
)
from fxopt_rewrite.plain_names import plain_function

NAME = "fxopt_test_offers"
LIBRARY: Any = torch.library.Library(NAME, "FRAGMENT")  # type: ignore[no-untyped-call]  # untyped in torch
LIBRARY.define("thrice(Tensor x) -> Tensor")
LIBRARY.impl("thrice", lambda x: x * 3, "CompositeExplicitAutograd")


@torch.fx.wrap
def twice(x: Tensor) -> Tensor:
    """Twice the values."""
    return x * 2


def unknown(x: Tensor) -> Tensor:
    """A function that nobody offers."""
    return x * 2


class Scale(nn.Module):
    """A layer of a plugin, with a setting."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = factor
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.factor


class Unknown(Scale):
    """A layer that nobody offers."""


class Offers:
    """A plugin without passes."""

    @hookimpl
    def fxopt_layers(self) -> Iterable[type[nn.Module]]:
        """One layer."""
        return [Scale]

    @hookimpl
    def fxopt_functions(self) -> Iterable[Callable[..., Any]]:
        """A function, and an operator."""
        return [twice, torch.ops.fxopt_test_offers.thrice]


@pytest.fixture(scope="module", autouse=True)
def offered() -> None:
    """For the rest of the process: plugins stay."""
    registry().register(Offers(), name=NAME)


class ToTwice(Transformation):
    """relu(x) -> twice(x): it computes something else, which does not matter here."""

    def __init__(self, *, function: str = "twice") -> None:
        self.function = function

    def transform(self, graph_module: GraphModule) -> GraphModule:
        target = {"twice": twice, "thrice": torch.ops.fxopt_test_offers.thrice.default, "unknown": unknown}[
            self.function
        ]
        for node in graph_module.graph.find_nodes(op="call_function", target=torch.relu):
            node.target = target
        return graph_module


class Model(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.layer(x))


class Tracer(torch.fx.Tracer):
    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return True


def traced(layer: nn.Module, function: str) -> GraphModule:
    model = Model(layer)
    return ToTwice(function=function)(GraphModule(model, Tracer().trace(model)))


X = torch.randn(3, 4)


@pytest.mark.parametrize("function", ["twice", "thrice"])
def test_what_a_plugin_offers_is_saved_and_loaded(function: str) -> None:
    graph_module, file = traced(Scale(0.5), function), io.BytesIO()
    save(graph_module, file)
    file.seek(0)
    loaded = load(file)
    assert torch.equal(loaded(X), graph_module(X))
    layer = loaded.get_submodule("layer")
    assert type(layer) is Scale
    assert layer.factor == 0.5
    calls = [node.target for node in loaded.graph.nodes if node.op == "call_function"]
    assert calls == [node.target for node in graph_module.graph.nodes if node.op == "call_function"]
    assert history(loaded)[-1].pass_name == "to-twice"


@pytest.mark.parametrize(
    ("layer", "function", "message"),
    [
        (Unknown(0.5), "twice", "Unknown, which is neither of torch.nn nor offered by a plugin's hook fxopt_layers"),
        (Scale(0.5), "unknown", "unknown"),
    ],
)
def test_nothing_else_is_saved(layer: nn.Module, function: str, message: str) -> None:
    with pytest.raises(CaptureError) as caught:
        save(traced(layer, function), io.BytesIO())
    assert message in str(caught.value)


def test_names_that_files_may_have() -> None:
    path = f"{__name__}:Scale"
    assert layer_class(path) is Scale
    assert layer_class(f"{__name__}:Unknown") is None
    assert layer_class(["unhashable"]) is None
    assert plain_function(plain_name(twice)) is twice
    assert plain_name(unknown) is None
    with pytest.raises(UntrustedNameError, match="no plugin offers it"):
        plain_function(f"{__name__}:unknown")


PLUGIN = """
import torch
from fxopt_core import hookimpl

library = torch.library.Library("fxopt_test_others", "FRAGMENT")
library.define("thrice(Tensor x) -> Tensor")
library.impl("thrice", lambda x: x * 3, "CompositeExplicitAutograd")

@hookimpl
def fxopt_functions():
    return [torch.ops.fxopt_test_others.thrice]
"""


@pytest.mark.parametrize("is_pickle", [False, True])
def test_operators_are_found_in_plugins_that_nobody_has_loaded(
    is_pickle: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Plugins register them when they are loaded, which reading a file does."""
    graph_module, file = ToTwice(function="thrice")(symbolic_trace(Model(nn.Identity()))), io.BytesIO()
    former, name = NAME.encode(), b"fxopt_test_others"
    save(graph_module, file)
    archive = packed({key: content.replace(former, name) for key, content in entries_of(file).items()})
    pickled = pickle.dumps(graph_module).replace(former, name)
    (tmp_path / "thrice_plugin.py").write_text(PLUGIN)
    info = tmp_path / "thrice-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: thrice\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fxopt]\nthrice = thrice_plugin\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(importlib.import_module("fxopt_core.registry.registry"), "_PROCESS_REGISTRY", Registry())
    assert "thrice_plugin" not in sys.modules
    try:
        loaded = pickle.loads(pickled) if is_pickle else load(io.BytesIO(archive))
        assert torch.equal(loaded(X), 3 * X)
    finally:
        sys.modules.pop("thrice_plugin").library._destroy()
