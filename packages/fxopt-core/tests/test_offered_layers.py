"""Plugins offer layers and functions, by which files name them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_core import PluginLoadError, Registry, hookimpl


class Doubled(nn.Module):
    """A layer of a stranger."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2


def halve(x: Tensor) -> Tensor:
    """A function of a stranger."""
    return x / 2


class Offering:
    """A plugin with both hooks, and no pass."""

    def __init__(self, layers: Any = (Doubled,), functions: Any = (halve,)) -> None:
        self.layers, self.functions = layers, functions

    @hookimpl
    def fxopt_layers(self) -> Iterable[type[nn.Module]]:
        """What it was made with."""
        layers: Iterable[type[nn.Module]] = self.layers
        return layers

    @hookimpl
    def fxopt_functions(self) -> Iterable[Callable[..., Any]]:
        """What it was made with."""
        functions: Iterable[Callable[..., Any]] = self.functions
        return functions


def test_they_are_found_by_name() -> None:
    known = Registry(entry_points=[])
    known.register(Offering())
    assert known.layers() == {f"{__name__}:Doubled": Doubled}
    assert known.functions() == {f"{__name__}:halve": halve}
    assert not known.available()
    with pytest.raises(TypeError):
        known.layers()["torch:x"] = nn.Linear  # type: ignore[index]  # it is read-only


def test_an_operator_stands_for_its_overloads() -> None:
    known = Registry(entry_points=[])
    known.register(Offering(functions=[torch.ops.aten.relu, operator.mul]))
    assert known.functions()["torch:ops.aten.relu.default"] is torch.ops.aten.relu.default
    assert known.functions()["torch:ops.aten.relu"] is torch.ops.aten.relu
    assert known.functions()["_operator:mul"] is operator.mul


def test_two_plugins_may_offer_the_same() -> None:
    known = Registry(entry_points=[])
    known.register(Offering(), name="one")
    known.register(Offering(), name="another")
    assert [*known.layers().values()] == [Doubled]
    assert not known.failed


def local_class() -> type[nn.Module]:
    class Hidden(nn.Module):
        pass

    return Hidden


@pytest.mark.parametrize(
    ("plugin", "message"),
    [
        (Offering(layers=None), "hook fxopt_layers returned a value of type NoneType, expected an iterable"),
        (Offering(layers=[int]), "expected a subclass of torch.nn.Module"),
        (Offering(layers=[GraphModule]), "expected a subclass of torch.nn.Module"),
        (Offering(layers=[local_class()]), "Hidden, which files cannot name; define it at the top of a module"),
        (Offering(functions=[lambda x: x]), "which files cannot name; define it at the top of a module"),
        (Offering(functions=halve), "test_offered_layers.halve, expected an iterable"),
        (Offering(functions=[Doubled]), "expected a function or an operator"),
    ],
)
def test_what_files_cannot_name_is_an_error_of_the_plugin(plugin: Any, message: str) -> None:
    known = Registry(entry_points=[])
    with pytest.raises(PluginLoadError, match="Offering") as caught:
        known.register(plugin)
    assert message in str(caught.value)
    assert not known.layers()
    assert not known.functions()
