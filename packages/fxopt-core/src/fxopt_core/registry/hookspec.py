"""The hooks of a plugin, and how a plugin's types are checked.

A plugin is a light module that an entry point of the group ``fxopt`` names, or any object given to
`Registry.register`:

    from fxopt_core import hookimpl
    from my_package.shrink import Shrink

    @hookimpl
    def fxopt_transformations():
        return [Shrink]

``mypy --strict`` finds a wrong plugin: the markers take only functions that return what a hook has to return,
`Registry.register` takes only what implements a hook, and a line in a test finds misspelt names and parameters:

    import my_package.plugin

    plugin: TransformationsPlugin = my_package.plugin
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import pluggy

if TYPE_CHECKING:
    from torch import nn

    from fxopt_core.passes.transformation import Transformation

PROJECT = "fxopt"
"""The name of the entry-point group and of pluggy's project."""

_Hook = TypeVar("_Hook", bound="Callable[..., Iterable[Callable[..., Any]] | Mapping[str, str]]")  # as classes are


class _Marker(Protocol):
    """A decorator that keeps the type of what it marks, and takes only what a hook can be."""

    def __call__(self, function: _Hook) -> _Hook: ...


hookspec: _Marker = pluggy.HookspecMarker(PROJECT)
"""Marks the specification of a hook: the methods of the protocols below."""

hookimpl: _Marker = pluggy.HookimplMarker(PROJECT)
"""Marks a plugin's implementation of a hook."""


class TransformationsPlugin(Protocol):
    """A module, or any other object, that offers passes."""

    @hookspec
    def fxopt_transformations(self) -> Iterable[type[Transformation]]:
        """Return the classes of the passes.

        Each is concrete, has a docstring whose first line says what it does, and can be constructed without arguments:
        its options have defaults.
        """


class PipelinesPlugin(Protocol):
    """A module, or any other object, that offers named pipelines."""

    @hookspec
    def fxopt_pipelines(self) -> Mapping[str, str]:
        """Return named pipelines: pipeline text by name.

        The text may use the passes of any plugin, and other named pipelines.
        """


class LayersPlugin(Protocol):
    """A module, or any other object, that offers layers: classes of modules that its passes put in."""

    @hookspec
    def fxopt_layers(self) -> Iterable[type[nn.Module]]:
        """Return the classes of layers that files may name, of archives.

        Each is found by its module and name. A file from a stranger may hold one with any tensors and any plain data as
        attributes, set without calling its constructor: its ``forward`` does nothing but compute.
        """


class FunctionsPlugin(Protocol):
    """A module, or any other object, that offers functions: those that its passes let graphs call."""

    @hookspec
    def fxopt_functions(self) -> Iterable[Callable[..., Any]]:
        """Return the functions and operators that the graphs of files may call.

        Each is found by its module and name, or is an operator such as ``torch.ops.mine.scale``, which stands for all
        of its overloads. A file from a stranger may call one with any arguments: it does nothing but compute.
        """


Plugin = TransformationsPlugin | PipelinesPlugin | LayersPlugin | FunctionsPlugin
"""What implements a hook."""

SPECS = (TransformationsPlugin, PipelinesPlugin, LayersPlugin, FunctionsPlugin)
HOOKS = ("fxopt_transformations", "fxopt_pipelines", "fxopt_layers", "fxopt_functions")
"""The names of the hooks: first those whose results have names in pipeline text, then those whose files name."""
