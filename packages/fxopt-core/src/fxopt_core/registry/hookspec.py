"""The hooks of a plugin, and how a plugin's types are checked.

A plugin is a light module that an entry point of the group ``fxopt`` names, or any object given to
`Registry.register`:

    from fxopt_core import hookimpl
    from my_package.shrink import Shrink

    @hookimpl
    def fxopt_transformations():
        return [Shrink]

``mypy --strict`` checks plugins: the markers accept only functions with the return type of a hook,
`Registry.register` accepts only implementations of a hook, and a line in a test finds misspelt names and parameters:

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

#: The name of the entry-point group and of pluggy's project.
PROJECT = "fxopt"

_Hook = TypeVar("_Hook", bound="Callable[..., Iterable[Callable[..., Any]] | Mapping[str, str]]")  # as classes are


class _Marker(Protocol):
    """A decorator that keeps the type of a function, and accepts only functions that can be hooks."""

    def __call__(self, function: _Hook) -> _Hook: ...


#: Marks the specification of a hook: the methods of the protocols below.
hookspec: _Marker = pluggy.HookspecMarker(PROJECT)

#: Marks a plugin's implementation of a hook.
hookimpl: _Marker = pluggy.HookimplMarker(PROJECT)


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
    """A module, or any other object, that offers layers: the module classes that its passes insert."""

    @hookspec
    def fxopt_layers(self) -> Iterable[type[nn.Module]]:
        """Return the classes of layers that archives may name.

        Each is looked up by module and name. An untrusted file may set any tensors and any plain data as attributes,
        without calling the constructor, so ``forward`` must do nothing but compute.
        """


class FunctionsPlugin(Protocol):
    """A module, or any other object, that offers functions: those that its rewritten graphs call."""

    @hookspec
    def fxopt_functions(self) -> Iterable[Callable[..., Any]]:
        """Return the functions and operators that the graphs of files may call.

        Each is looked up by module and name, or is an operator such as ``torch.ops.mine.scale``, which stands for all
        of its overloads. An untrusted file may pass any arguments, so a function must do nothing but compute.
        """


#: What implements a hook.
Plugin = TransformationsPlugin | PipelinesPlugin | LayersPlugin | FunctionsPlugin

SPECS = (TransformationsPlugin, PipelinesPlugin, LayersPlugin, FunctionsPlugin)
#: The names of the hooks: first those whose results pipeline text names, then those whose results files name.
HOOKS = ("fxopt_transformations", "fxopt_pipelines", "fxopt_layers", "fxopt_functions")
