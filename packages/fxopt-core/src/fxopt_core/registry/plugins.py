"""The plugins: each is read and checked in full, so that nothing of it can break the registry later.

`Offers` is what all of them offer, the names that several claim set aside. What is part of fxopt keeps its names.
"""

from __future__ import annotations

import difflib
import inspect
import os
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import pluggy
from torch import nn
from torch._ops import OpOverloadPacket
from torch.fx import GraphModule

from fxopt_core.errors import DuplicatePassError, PipelineSyntaxError, PluginLoadError, UnknownPassError, halted_by
from fxopt_core.names import describe, name_of
from fxopt_core.naming import NAME, close_names, kebab_case
from fxopt_core.passes.options import options_of
from fxopt_core.passes.transformation import Transformation
from fxopt_core.registry.hookspec import HOOKS, PROJECT, SPECS
from fxopt_core.registry.pass_info import PassInfo
from fxopt_core.registry.pipeline import parse_pipeline
from fxopt_core.registry.shipped import SHIPPED, SHIPPED_NAMES

ALLOW_LIST = "FXOPT_PLUGINS"
"""Environment variable: entry-point names to load, separated by commas. Unset: all; empty: none."""

_UMBRELLA = {"fxopt": "_fxopt_entry_points"}  # a file fxopt.py beside a script is not to be imported for its plugin


class PluginEntryPoint(Protocol):
    """What is needed of an `importlib.metadata.EntryPoint`."""

    @property
    def name(self) -> str:
        """Name of the plugin."""

    @property
    def dist(self) -> Any:
        """The distribution that declares it, or None."""

    def load(self) -> Any:
        """Return the plugin."""


class PluginSource(NamedTuple):
    """The name of a plugin, and the distribution whose entry point it is; that is empty for a registered one."""

    name: str
    distribution: str = ""
    version: str = ""
    shipped: bool = False  # with fxopt

    def __str__(self) -> str:
        origin = f"of {self.distribution} {self.version}".rstrip()
        return f"{self.name!r} ({origin if self.distribution else 'registered in this process'})"


def _source_of(point: PluginEntryPoint) -> PluginSource:
    """Return where a plugin comes from: its distribution, name and module together say whether it is part of fxopt."""
    try:
        name, version = str(point.dist.name), str(point.dist.version)
    except Exception:  # an entry point made by hand, or a distribution whose metadata cannot be read
        return PluginSource(point.name, "an unknown distribution")
    package = name.replace("-", "_")
    own = package.removeprefix("fxopt_"), f"{_UMBRELLA.get(package, package)}.plugin"
    shipped = name in SHIPPED and (point.name, getattr(point, "value", None)) == own
    return PluginSource(point.name, name, version, shipped)


Offer = Mapping[str, Any]  # what each hook of a plugin gave, checked


class Offers:
    """What plugins offer at one time; never changed.

    A name that several claim stays with the one that is part of fxopt, or is nobody's.
    """

    def __init__(
        self,
        offers: Mapping[PluginSource, Offer],
        broken: Mapping[str, PluginLoadError],
        found: Set[str],
        allowed: Set[str],
    ) -> None:
        self.offers = offers
        self.broken = broken  # plugins that could not be read, and names that several plugins have
        self.found, self.allowed = found, allowed  # names of entry points
        self.plugins = frozenset({*(source.name for source in offers), *found})
        self.left_out, self.missing = tuple(sorted(found - allowed)), tuple(sorted(allowed - self.plugins))
        self.layers, self.functions = (
            MappingProxyType({name: each for offer in offers.values() for name, each in offer[hook].items()})
            for hook in HOOKS[2:]
        )
        claims: defaultdict[str, list[tuple[PluginSource, PassInfo | str]]] = defaultdict(list)
        for source in sorted(offers, key=lambda source: not source.shipped):
            for name, item in (item for hook in HOOKS[:2] for item in offers[source][hook]):
                claims[name].append((source, item))
        self.names: dict[str, PassInfo | str] = {}
        self.contested: dict[str, str] = {}
        messages: defaultdict[str, list[str]] = defaultdict(list)
        for name, claimed in sorted(claims.items()):
            kept = _first_keeps([source for source, _ in claimed])
            if kept:
                self.names[name] = claimed[0][1]
            if len(claimed) > 1:
                what = (f"as a {'pipeline' if isinstance(i, str) else 'pass'} by plugin {s}" for s, i in claimed)
                result = "and stays with the first, a part of fxopt" if kept else "so that nobody gets it"
                text = f"{name!r} is claimed {' and '.join(what)}, {result}; leave one out of {ALLOW_LIST}"
                self.contested[name] = text
                for plugin in dict.fromkeys(source.name for source, _ in claimed[kept:]):
                    messages[plugin].append(text)
        contested = {plugin: _clash("; ".join(texts)) for plugin, texts in messages.items()}
        self.failed = MappingProxyType(dict(sorted({**broken, **contested}.items())))

    def lookup(self, name: str) -> PassInfo | str:
        """Return the pass of this name, or the text of the pipeline of this name, or raise."""
        if name in self.names:
            return self.names[name]
        clash = self.broken[name].__cause__ if name in self.broken else None
        if name in self.contested or isinstance(clash, DuplicatePassError):
            raise DuplicatePassError(self.contested.get(name, str(clash)))
        home = SHIPPED_NAMES.get(kebab_case(name))
        if home is not None and home.removeprefix("fxopt-") not in self.found:
            hint = f": it is in {home}, which is not installed: pip install {home}"
        else:
            known = f"; print(registry()) or, in a shell, `fxopt list` shows the {len(self.names)} that are there"
            hint = close_names(name, self.names) or known
        lines = [f"no pass or pipeline is named {name!r}{hint}"]
        for names, what in (
            (self.failed, "these plugins failed, see registry().failed"),
            (self.left_out, f"{ALLOW_LIST} leaves out these plugins"),
            (self.missing, f"{ALLOW_LIST} names plugins that are not installed"),
        ):
            lines += [f"{what}: {', '.join(names)}"] if names else []
        raise UnknownPassError("\n  ".join(lines))

    def extended(self, plugin: object, source: PluginSource) -> Offers:
        """Return these and what one more plugin offers, or raise where one of its names is taken."""
        known = {each.name: f"it is {each}" for each in self.offers} | {n: str(e) for n, e in self.broken.items()}
        if source.name in known:
            taken = f"a plugin is named {source.name!r} already ({known[source.name]})"
            raise DuplicatePassError(f"{taken}; register the other under another name")
        offer = read_plugin(lambda: plugin, source)
        extended = Offers({**self.offers, source: offer}, self.broken, self.found, self.allowed)
        for name, _ in (item for hook in HOOKS[:2] for item in offer[hook]):
            if name in extended.contested:
                raise DuplicatePassError(extended.contested[name])
        return extended


def _first_keeps(sources: Sequence[PluginSource]) -> bool:
    """Return whether the first of those that claim one name keeps it: it is the only one, or the only one of fxopt."""
    return len(sources) == 1 or sources[0].shipped > sources[1].shipped


def _clash(text: str) -> PluginLoadError:
    error = PluginLoadError(text)
    error.__cause__ = DuplicatePassError(text)
    return error


def read_plugins(points: Iterable[PluginEntryPoint]) -> Offers:
    """Load the plugins that the allow-list names, one at a time; what goes wrong with one is a failure of it alone."""
    by_name: defaultdict[str, list[tuple[PluginSource, PluginEntryPoint]]] = defaultdict(list)
    for point in points:
        by_name[point.name].append((_source_of(point), point))
    value = os.environ.get(ALLOW_LIST)
    allowed = by_name.keys() if value is None else {name.strip() for name in value.split(",")} - {""}
    offers: dict[PluginSource, Offer] = {}
    broken: dict[str, PluginLoadError] = {}
    for name in sorted(by_name.keys() & allowed):
        claims = sorted(by_name[name], key=lambda claim: not claim[0].shipped)
        sources = [source for source, _ in claims]
        kept = _first_keeps(sources)
        if len(claims) > 1:
            result = "The first is part of fxopt and keeps it" if kept else "uninstall one"
            broken[name] = _clash(f"several plugins are named {name!r}: {' and '.join(map(str, sources))}. {result}")
        if kept:
            try:
                offers[sources[0]] = read_plugin(claims[0][1].load, sources[0])
            except PluginLoadError as error:
                broken[name] = error
    return Offers(offers, broken, by_name.keys(), allowed)


def read_plugin(load: Callable[[], object], source: PluginSource) -> Offer:
    """Load a plugin, call each of its hooks alone, and read and check the results to the end."""
    handled = sys.exc_info()[1]
    try:
        given = {hook: function() for hook, function in _implementations(load()).items()}
        pipelines = given.get("fxopt_pipelines", {})
        if not isinstance(pipelines, Mapping):
            raise PluginLoadError(f"hook fxopt_pipelines returned {describe(pipelines)}, expected a mapping of texts")
        classes = dict.fromkeys(_items("fxopt_transformations", given))
        return {
            "fxopt_transformations": [(info.name, info) for info in (_pass_info(cls, source) for cls in classes)],
            "fxopt_pipelines": [(_checked_name(name), _checked_text(name, text)) for name, text in pipelines.items()],
            "fxopt_layers": dict(_named("fxopt_layers", given, _is_layer, "a subclass of torch.nn.Module")),
            "fxopt_functions": dict(_named("fxopt_functions", given, _is_function, "a function or an operator")),
        }
    except BaseException as error:  # foreign code may raise anything: SystemExit, a cancelled task, a skipped test
        if interrupt := halted_by(error, handled):
            raise interrupt from None
        if isinstance(error, PluginLoadError):
            raise PluginLoadError(f"plugin {source}: {error}") from error.__cause__
        raise PluginLoadError(f"plugin {source} failed to load: {type(error).__name__}: {error}") from error


def _implementations(plugin: object) -> dict[str, Callable[[], Any]]:
    """Return the hooks of a plugin; raise where one is misspelt or unmarked."""
    for name in dir(plugin):
        close = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.8) if name.startswith("fxopt_") else []
        if close and name not in HOOKS:
            raise PluginLoadError(f"{name} looks like {close[0]} misspelt; rename it")
    manager = pluggy.PluginManager(PROJECT)  # one of its own: a misspelt hook does not concern the other plugins
    for spec in SPECS:
        manager.add_hookspecs(spec)
    manager.register(plugin)
    manager.check_pending()
    found = {hook: impl.function for hook in HOOKS for impl in getattr(manager.hook, hook).get_hookimpls()}
    for hook in HOOKS:
        if hasattr(plugin, hook) and hook not in found:
            raise PluginLoadError(f"{hook} is not marked as a hook; decorate it with @fxopt_core.hookimpl")
        if inspect.iscoroutinefunction(found.get(hook)):
            raise PluginLoadError(f"hook {hook} is a coroutine, which nobody awaits; expected a plain function")
    if not found:
        raise PluginLoadError(
            f"it has no hooks; define one of {', '.join(HOOKS)} in it and decorate it with @fxopt_core.hookimpl"
        )
    return found


def _items(hook: str, given: Mapping[str, Any]) -> list[Any]:
    result = given.get(hook, ())
    if not isinstance(result, Iterable) or isinstance(result, (str, bytes)):
        raise PluginLoadError(f"hook {hook} returned {describe(result)}, expected an iterable")
    return list(result)


def _named(
    hook: str, given: Mapping[str, Any], fits: Callable[[object], bool], expected: str
) -> Iterator[tuple[str, Any]]:
    """Yield what files may name; an operator is followed by its overloads, which are what most graphs call."""
    for item in _items(hook, given):
        if not fits(item):
            raise PluginLoadError(f"hook {hook} gave {describe(item)}, expected {expected}")
        packet: Any = item
        overloads = packet.overloads() if isinstance(item, OpOverloadPacket) else ()
        for each in (item, *(getattr(packet, overload) for overload in overloads)):
            name = name_of(each)
            if name is None:
                found = f"hook {hook} gave {describe(each)}, which files cannot name"
                raise PluginLoadError(f"{found}; define it at the top of a module")
            yield name, each


def _is_layer(item: object) -> bool:
    return isinstance(item, type) and issubclass(item, nn.Module) and not issubclass(item, GraphModule)


def _is_function(item: object) -> bool:
    return callable(item) and not isinstance(item, (type, nn.Module))


def _pass_info(cls: Any, source: PluginSource) -> PassInfo:
    found = f"hook fxopt_transformations gave {describe(cls)}"
    if not (isinstance(cls, type) and issubclass(cls, Transformation)):
        raise PluginLoadError(f"{found}, expected a subclass of fxopt_core.Transformation")
    if inspect.isabstract(cls):
        raise PluginLoadError(f"{found}, which is abstract; implement {', '.join(sorted(cls.__abstractmethods__))}")
    options = options_of(cls)
    required = [option.name for option in options.values() if option.required]
    if required:
        raise PluginLoadError(f"{found}, whose constructor needs {', '.join(required)}; give every parameter a default")
    own = inspect.getattr_static(cls, "name", None)
    return PassInfo(
        name=_checked_name(own if isinstance(own, str) else kebab_case(cls.__name__)),
        summary=inspect.cleandoc(cls.__doc__ or "").partition("\n")[0],
        family=source.name,
        distribution=source.distribution,
        version=source.version,
        reversible=cls.reversible,
        preserves_computation=bool(cls.preserves_computation),
        options=options,
        transformation=cls,
    )


def _checked_text(name: object, text: object) -> str:
    if not isinstance(text, str):
        raise PluginLoadError(f"pipeline {name!r} is {describe(text)}, expected pipeline text")
    try:
        parse_pipeline(text)
    except PipelineSyntaxError as error:
        raise PluginLoadError(f"pipeline {name!r} cannot be read: {error}") from error
    return text


def _checked_name(name: object) -> str:
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise PluginLoadError(f"{name!r} is no name; use letters, digits and dashes (`merge-linears`)")
    return name
