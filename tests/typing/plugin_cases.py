"""What mypy --strict accepts and refuses of plugins and passes. Nothing here runs: the session `types` checks it.

Each refusal is an `ignore` with the code of the error that is expected: where mypy no longer finds one, the comment is
an error itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import right_plugin
import wrong_plugin
from torch.fx import GraphModule, Node

from fxopt_compile import as_inductor_pass, as_pass_base
from fxopt_core import (
    PipelinesPlugin,
    Registry,
    ReversibleTransformation,
    Transformation,
    TransformationsPlugin,
    hookimpl,
)

passes: TransformationsPlugin = right_plugin
pipelines: PipelinesPlugin = right_plugin
no_passes: TransformationsPlugin = wrong_plugin  # type: ignore[assignment]  # its hook has a parameter
no_pipelines: PipelinesPlugin = wrong_plugin  # type: ignore[assignment]  # its hook is misspelt


class Pass(Transformation):
    """A pass, as a user writes it."""

    def __init__(self, *, times: int = 1) -> None:
        self.times = times

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Nothing."""
        return graph_module


class Plugin:
    """A plugin with all hooks."""

    @hookimpl
    def fxopt_transformations(self) -> Iterable[type[Transformation]]:
        """One pass."""
        return [Pass]

    @hookimpl
    def fxopt_pipelines(self) -> Mapping[str, str]:
        """One pipeline."""
        return {"twice": "pass{times=2}"}


class ReturnsObjects:
    """A wrong plugin: it offers passes instead of their classes."""

    def fxopt_transformations(self) -> Iterable[Transformation]:
        """An object."""
        return [Pass()]


class Misspelt:
    """A wrong plugin: its hook has another name."""

    def fxopt_transformation(self) -> Iterable[type[Transformation]]:
        """One pass."""
        return [Pass]


class TakesArguments:
    """A wrong plugin: nobody passes its argument."""

    def fxopt_transformations(self, registry: Registry) -> Iterable[type[Transformation]]:
        """One pass."""
        return [Pass]


def takes(*plugins: TransformationsPlugin | PipelinesPlugin) -> None:
    """Anything that has one of the hooks."""


def right(registry: Registry, graph_module: GraphModule, node: Node) -> tuple[list[Node], str, bool]:
    """All of this is accepted."""
    registry.register(Plugin())
    takes(Plugin())
    result: GraphModule = Pass(times=2)(graph_module, lint_and_recompile=False)
    return Pass().get_transformed_nodes(result), Pass().signature, Pass().transformed(node)


def wrong(registry: Registry, graph_module: GraphModule) -> None:
    """Each of these is refused."""
    registry.register(ReturnsObjects())  # type: ignore[arg-type]  # returns objects
    registry.register(Misspelt())  # type: ignore[arg-type]  # has no hook
    registry.register(TakesArguments())  # type: ignore[arg-type]  # takes an argument
    takes(Misspelt())  # type: ignore[arg-type]  # has no hook


@hookimpl  # type: ignore[type-var]  # a hook returns classes or a mapping
def fxopt_transformations() -> int:
    """A number."""
    return 1


class Half(ReversibleTransformation):
    """A wrong pass: reverse is missing."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Nothing."""
        return graph_module


Half()  # type: ignore[abstract]  # reverse is missing


def adapting(graph_module: GraphModule) -> tuple[bool, str | None]:
    """What the adapters take."""
    as_pass_base(Pass)  # type: ignore[arg-type]  # a class in place of an object
    as_inductor_pass(as_pass_base)  # type: ignore[arg-type]  # a function is no transformation
    return as_pass_base(Pass()).call(graph_module).modified, as_inductor_pass(Pass()).uuid()
