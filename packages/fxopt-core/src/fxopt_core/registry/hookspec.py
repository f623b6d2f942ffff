"""The two hooks of a plugin, and how a plugin's types are checked.

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
from typing import TYPE_CHECKING, Protocol, TypeVar

import pluggy

if TYPE_CHECKING:
    from fxopt_core.passes.transformation import Transformation

PROJECT = "fxopt"
"""The name of the entry-point group and of pluggy's project."""

_Hook = TypeVar("_Hook", bound="Callable[..., Iterable[type[Transformation]] | Mapping[str, str]]")


class _Marker(Protocol):
    """A decorator that keeps the type of what it marks, and takes only what a hook can be."""

    def __call__(self, function: _Hook) -> _Hook: ...


hookspec: _Marker = pluggy.HookspecMarker(PROJECT)
"""Marks the specification of a hook: the two methods of the protocols below."""

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
