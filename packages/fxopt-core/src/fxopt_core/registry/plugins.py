"""Loading of plugins: each is read and checked in full, so that it cannot break the registry later."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from importlib.metadata import EntryPoint
from typing import Any, NamedTuple

import pluggy
from torch import nn
from torch._ops import OpOverloadPacket
from torch.fx import GraphModule

from fxopt_core.errors import PluginLoadError, halted_by
from fxopt_core.names import describe, name_of
from fxopt_core.naming import NAME
from fxopt_core.passes.options import options_of
from fxopt_core.passes.transformation import Transformation
from fxopt_core.registry.hookspec import HOOKS, PROJECT, SPECS
from fxopt_core.registry.pass_info import PassInfo
from fxopt_core.registry.pipeline import parse_pipeline
from fxopt_core.registry.shipped import SHIPPED

_UMBRELLA = {"fxopt": "_fxopt_entry_points"}  # a file fxopt.py beside a script is not to be imported for its plugin


class PluginSource(NamedTuple):
    """A plugin's name and its distribution, which is empty for a plugin registered in this process."""

    name: str
    distribution: str = ""
    version: str = ""
    shipped: bool = False  # with fxopt

    def __str__(self) -> str:
        origin = f"of {self.distribution} {self.version}".rstrip()
        return f"{self.name!r} ({origin if self.distribution else 'registered in this process'})"


def source_of(point: EntryPoint) -> PluginSource:
    """Return where a plugin comes from; it is part of fxopt if its distribution, name and module all match."""
    try:
        name, version = str(point.dist.name), str(point.dist.version)  # type: ignore[union-attr]  # None is caught
    except Exception:  # an entry point made by hand, or a distribution whose metadata cannot be read
        return PluginSource(point.name, "an unknown distribution")
    package = name.replace("-", "_")
    own = package.removeprefix("fxopt_"), f"{_UMBRELLA.get(package, package)}.plugin"
    shipped = name in SHIPPED and (point.name, getattr(point, "value", None)) == own
    return PluginSource(point.name, name, version, shipped)


class Offer(NamedTuple):
    """What a plugin offers, checked."""

    items: list[tuple[str, PassInfo | str]]  # passes and texts of pipelines by name; a name may stand twice
    layers: dict[str, Any]
    functions: dict[str, Any]


def read_plugin(load: Callable[[], object], source: PluginSource) -> Offer:
    """Load a plugin, call its hooks, and check everything that they return."""
    try:
        given = {hook: function() for hook, function in _implementations(load()).items()}
        for hook, result in given.items():
            if not isinstance(result, Iterable):
                raise TypeError(f"hook {hook} returned {describe(result)}, expected an iterable")
        passes = [_pass_info(cls, source) for cls in dict.fromkeys(given.get("fxopt_transformations", ()))]
        pipelines = map(_checked_pipeline, given.get("fxopt_pipelines", {}).items())
        return Offer(
            [*((info.name, info) for info in passes), *pipelines],
            dict(_named("fxopt_layers", given, "a subclass of torch.nn.Module")),
            dict(_named("fxopt_functions", given, "a function or an operator")),
        )
    except BaseException as error:  # foreign code may raise anything: SystemExit, a cancelled task, a skipped test
        if (interrupt := halted_by(error)) is not None:
            raise interrupt from None
        raise PluginLoadError(f"plugin {source} failed to load: {type(error).__name__}: {error}") from error


def _implementations(plugin: object) -> dict[str, Callable[[], Any]]:
    """Return the hooks of a plugin; raise where a marked one is misspelt, or none is marked."""
    manager = pluggy.PluginManager(PROJECT)  # one of its own: a misspelt hook does not concern the other plugins
    for spec in SPECS:
        manager.add_hookspecs(spec)
    manager.register(plugin)
    manager.check_pending()
    found = {hook: impl.function for hook in HOOKS for impl in getattr(manager.hook, hook).get_hookimpls()}
    if not found:
        raise TypeError(f"it has no hook, as {', '.join(HOOKS)} are; decorate the function with @fxopt_core.hookimpl")
    return found


def _named(hook: str, given: Mapping[str, Any], expected: str) -> Iterator[tuple[str, Any]]:
    """Yield the objects that files may name; an operator is followed by its overloads, which most graphs call."""
    for item in given.get(hook, ()):
        is_layer = isinstance(item, type) and issubclass(item, nn.Module) and not issubclass(item, GraphModule)
        is_function = callable(item) and not isinstance(item, (type, nn.Module))
        if not (is_layer if hook == "fxopt_layers" else is_function):
            raise TypeError(f"hook {hook} gave {describe(item)}, expected {expected}")
        packet: Any = item  # torch does not say what it returns
        overloads = packet.overloads() if isinstance(item, OpOverloadPacket) else ()
        for each in (item, *(getattr(packet, overload) for overload in overloads)):
            name = name_of(each)
            if name is None:
                found = f"hook {hook} gave {describe(each)}, which files cannot name"
                raise TypeError(f"{found}; define it at the top of a module")
            yield name, each


def _pass_info(cls: Any, source: PluginSource) -> PassInfo:
    if not (isinstance(cls, type) and issubclass(cls, Transformation)):
        raise TypeError(f"hook fxopt_transformations gave {describe(cls)}, expected a subclass of Transformation")
    return PassInfo(
        name=_checked_name(cls().name),  # it is concrete, and its options have defaults
        summary=inspect.cleandoc(cls.__doc__ or "").partition("\n")[0].replace("``", "`"),
        family=source.name,
        distribution=source.distribution,
        version=source.version,
        reversible=cls.reversible,
        preserves_computation=bool(cls.preserves_computation),
        options=options_of(cls),
        transformation=cls,
    )


def _checked_pipeline(item: tuple[object, object]) -> tuple[str, str]:
    name, text = item
    if not isinstance(text, str):
        raise TypeError(f"pipeline {name!r} is {describe(text)}, expected pipeline text")
    parse_pipeline(text)
    return _checked_name(name), text


def _checked_name(name: object) -> str:
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise ValueError(f"{name!r} is not a valid name; use letters, digits and dashes (`merge-linears`)")
    return name
