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
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

from torch import nn
from torch._ops import OpOverloadPacket
from torch.fx import GraphModule

from fxopt_core.errors import DuplicatePassError, PipelineSyntaxError, PluginLoadError, UnknownPassError, halted_by
from fxopt_core.naming import NAME, close_names, kebab_case, type_text
from fxopt_core.passes.options import options_of
from fxopt_core.passes.transformation import Transformation
from fxopt_core.registry.hookspec import PROJECT
from fxopt_core.registry.pass_info import PassInfo
from fxopt_core.registry.pipeline import parse_pipeline
from fxopt_core.registry.shipped import SHIPPED_NAMES
from fxopt_core.values.names import class_path, describe, importable_name, name_of

ALLOW_LIST = "FXOPT_PLUGINS"
"""Environment variable: entry-point names to load, separated by commas. Unset: all; empty: none."""

_FAMILIES = ("core", "linear", "norm", "arith", "cpu", "simplify")
SHIPPED = ("fxopt", *(f"fxopt_{name}" for name in _FAMILIES))
"""Packages of fxopt with a plugin; distribution fxopt-linear, say, declares `fxopt_linear.plugin` as `linear`."""
_UMBRELLA = {"fxopt": "_fxopt_entry_points"}  # a file fxopt.py beside a script is not to be imported for its plugin

HOOKS = ("fxopt_transformations", "fxopt_pipelines", "fxopt_layers", "fxopt_functions")
_MARK = "decorate it with @fxopt_core.hookimpl"


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


@dataclass(frozen=True)
class PluginSource:
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
    shipped = package in SHIPPED and (point.name, getattr(point, "value", None)) == own
    return PluginSource(point.name, name, version, shipped)


@dataclass(frozen=True)
class PluginOffer:
    """What a plugin offers; passes and named pipelines of two plugins may still claim one name."""

    source: PluginSource
    passes: tuple[PassInfo, ...]
    pipelines: Mapping[str, str] = field(hash=False)
    layers: Mapping[str, type[nn.Module]] = field(hash=False)
    functions: Mapping[str, Callable[..., Any]] = field(hash=False)


class Offers:
    """What plugins offer at one time, the names that several of them claim set aside; never changed."""

    def __init__(
        self, offers: Sequence[PluginOffer], broken: Mapping[str, PluginLoadError], found: Set[str], allowed: Set[str]
    ) -> None:
        self.offers = offers
        self.broken = broken  # plugins that could not be read, and names that several plugins have
        self.found, self.allowed = found, allowed  # names of entry points
        self.plugins = frozenset({*(offer.source.name for offer in offers), *found})
        self.left_out, self.missing = tuple(sorted(found - allowed)), tuple(sorted(allowed - self.plugins))
        claims = _claims(offers)
        self.names: dict[str, PassInfo | str] = {
            name: found[0].item for name, found in sorted(claims.items()) if _settled(found)
        }
        self.layers = MappingProxyType({path: cls for offer in offers for path, cls in offer.layers.items()})
        self.functions = MappingProxyType({name: each for offer in offers for name, each in offer.functions.items()})
        self._contested = {name: claimed for name, claimed in claims.items() if len(claimed) > 1}
        self.failed = MappingProxyType(self._failures())

    def lookup(self, name: str) -> PassInfo | str:
        """Return the pass of this name, or the text of the pipeline of this name, or raise."""
        found = self.names.get(name)
        if found is None:
            self.check_is_unique(name)
            raise UnknownPassError(self._unknown(name))
        return found

    def check_is_unique(self, name: str) -> None:
        """Raise if several plugins claim a name, or if it is the name of several plugins."""
        if name in self._contested:
            raise DuplicatePassError(_contest_text(name, self._contested[name]))
        clash = self.broken[name].__cause__ if name in self.broken and name not in self.names else None
        if isinstance(clash, DuplicatePassError):
            raise DuplicatePassError(str(clash))

    def check_plugin_is_new(self, source: PluginSource) -> None:
        """Raise if a plugin of this name is there already, be it broken."""
        clash = self.broken[source.name].__cause__ if source.name in self.broken else None
        if isinstance(clash, DuplicatePassError):
            raise DuplicatePassError(f"{clash}; {source} would be one more")
        taken = [offer.source for offer in self.offers if offer.source.name == source.name]
        taken += [PluginSource(source.name, "a distribution that failed to load")] * (source.name in self.broken)
        if taken:
            raise DuplicatePassError(_clash_text(source.name, (*taken, source)))

    def _failures(self) -> dict[str, PluginLoadError]:
        messages: defaultdict[str, list[str]] = defaultdict(list)
        for name, claims in self._contested.items():
            for plugin in dict.fromkeys(claim.source.name for claim in claims[_settled(claims) :]):
                messages[plugin].append(_contest_text(name, claims))
        contested = {plugin: _failure(*lines) for plugin, lines in messages.items()}
        return dict(sorted({**self.broken, **contested}.items()))

    def _unknown(self, name: str) -> str:
        home = SHIPPED_NAMES.get(kebab_case(name))
        if home is not None and home.removeprefix("fxopt-") not in self.found:
            hint = f": it is in {home}, which is not installed: pip install {home}"
        else:
            known = f"; print(registry()) or, in a shell, `fxopt list` shows the {len(self.names)} that are there"
            hint = close_names(name, self.names) or known
        hints = []
        if self.failed:
            hints.append(f"these plugins failed, see registry().failed: {', '.join(self.failed)}")
        if self.left_out:
            hints.append(f"{ALLOW_LIST} leaves out these plugins: {', '.join(self.left_out)}")
        if self.missing:
            hints.append(f"{ALLOW_LIST} names plugins that are not installed: {', '.join(self.missing)}")
        return "\n  ".join([f"no pass or pipeline is named {name!r}{hint}", *hints])


class _Claim(NamedTuple):
    """What one plugin has under a name that others may want: a pass, the text of a pipeline, or an entry point."""

    source: PluginSource
    item: Any

    def __str__(self) -> str:
        return f"as a {'pipeline' if isinstance(self.item, str) else 'pass'} by plugin {self.source}"


def _claims(offers: Iterable[PluginOffer]) -> dict[str, list[_Claim]]:
    claims: defaultdict[str, list[_Claim]] = defaultdict(list)
    for offer in sorted(offers, key=lambda offer: not offer.source.shipped):
        for name, item in (*((info.name, info) for info in offer.passes), *offer.pipelines.items()):
            claims[name].append(_Claim(offer.source, item))
    return claims


def _settled(claims: Sequence[_Claim]) -> bool:
    """Return whether the first of those that claim one name keeps it: it is the only one, or the only one of fxopt."""
    return len(claims) == 1 or claims[0].source.shipped > claims[1].source.shipped


def _contest_text(name: str, claims: Sequence[_Claim]) -> str:
    kept = _settled(claims)
    result = "and stays with the first, a part of fxopt; rename" if kept else "so that nobody gets it; uninstall"
    return f"{name!r} is claimed {' and '.join(map(str, claims))}, {result} one, or leave it out of {ALLOW_LIST}"


def _clash_text(name: str, sources: Iterable[PluginSource], kept: str = "") -> str:
    claimants = " and ".join(map(str, sources))
    return f"several plugins are named {name!r}: {claimants}; uninstall one, or register it under another name.{kept}"


def _failure(*messages: str) -> PluginLoadError:
    error = PluginLoadError("; ".join(messages))
    error.__cause__ = DuplicatePassError(messages[0])
    return error


def read_plugins(points: Iterable[PluginEntryPoint]) -> Offers:
    """Load the plugins that the allow-list names, one at a time; what goes wrong with one is a failure of it alone."""
    by_name: defaultdict[str, list[PluginEntryPoint]] = defaultdict(list)
    for point in points:
        by_name[point.name].append(point)
    value = os.environ.get(ALLOW_LIST)
    allowed = by_name.keys() if value is None else {name.strip() for name in value.split(",")} - {""}
    offers: list[PluginOffer] = []
    broken: dict[str, PluginLoadError] = {}
    for name in sorted(by_name.keys() & allowed):
        claims = [_Claim(_source_of(point), point) for point in by_name[name]]
        claims.sort(key=lambda claim: not claim.source.shipped)
        if len(claims) > 1:
            kept = " The first is part of fxopt and keeps it." * _settled(claims)
            broken[name] = _failure(_clash_text(name, (claim.source for claim in claims), kept))
        if _settled(claims):
            try:
                offers.append(read_plugin(claims[0].item.load, claims[0].source))
            except PluginLoadError as error:
                broken[name] = error
    return Offers(offers, broken, by_name.keys(), allowed)


def read_plugin(load: Callable[[], object], source: PluginSource) -> PluginOffer:
    """Load a plugin, call each of its hooks alone, and read and check the results to the end."""
    handled = sys.exc_info()[1]
    try:
        return _read(load(), source)
    except BaseException as error:  # foreign code may raise anything: SystemExit, a cancelled task, a skipped test
        if interrupt := halted_by(error, handled):
            raise interrupt from None
        if isinstance(error, PluginLoadError):
            raise PluginLoadError(f"plugin {source}: {error}") from error.__cause__
        raise PluginLoadError(f"plugin {source} failed to load: {type(error).__name__}: {error}") from error


def pass_name(cls: type[Transformation]) -> str:
    """Return the name under which a pass is offered: its class name in kebab-case, or its own attribute ``name``."""
    own = inspect.getattr_static(cls, "name", None)
    return own if isinstance(own, str) else kebab_case(cls.__name__)


def _read(plugin: object, source: PluginSource) -> PluginOffer:
    results = {hook: function() for hook, function in _implementations(plugin).items()}
    classes = _items("fxopt_transformations", results, "Transformation classes")
    infos = {cls: _pass_info(cls, source) for cls in map(_checked_class, classes)}
    return PluginOffer(
        source,
        tuple(infos.values()),
        _checked_pipelines(results.get("fxopt_pipelines", {})),
        dict(map(_checked_layer, _items("fxopt_layers", results, "classes of modules"))),
        dict(map(_checked_function, _functions(results))),
    )


def _items(hook: str, results: Mapping[str, object], expected: str) -> list[Any]:
    result = results.get(hook, ())
    if not isinstance(result, Iterable) or isinstance(result, (str, bytes)):
        raise PluginLoadError(f"hook {hook} returned {_described(result)}, expected an iterable of {expected}")
    return list(result)


def _checked_layer(item: object) -> tuple[str, type[nn.Module]]:
    found = f"hook fxopt_layers gave {_described(item)}"
    if not (isinstance(item, type) and issubclass(item, nn.Module)) or issubclass(item, GraphModule):
        raise PluginLoadError(f"{found}, expected a subclass of torch.nn.Module, and none of GraphModule")
    if importable_name(item) != class_path(item):
        raise PluginLoadError(f"{found}, which files cannot name; define it at the top of a module")
    return class_path(item), item


def _functions(results: Mapping[str, object]) -> Iterator[object]:
    """Yield functions and operators; an operator is followed by its overloads, which are what most graphs call."""
    for item in _items("fxopt_functions", results, "functions"):
        yield item
        if isinstance(item, OpOverloadPacket):
            packet: Any = item
            yield from (getattr(item, overload) for overload in packet.overloads())


def _checked_function(item: object) -> tuple[str, Callable[..., Any]]:
    if not callable(item) or isinstance(item, (type, nn.Module)):
        raise PluginLoadError(f"hook fxopt_functions gave {_described(item)}, expected a function or an operator")
    name = name_of(item)
    if name is None:
        found = f"hook fxopt_functions gave {describe(item)}"
        raise PluginLoadError(f"{found}, which files cannot name; define it at the top of a module")
    return name, item


def _checked_class(item: object) -> type[Transformation]:
    found = f"hook fxopt_transformations gave {_described(item)}"
    if isinstance(item, Transformation):
        raise PluginLoadError(f"{found}, expected the class itself: write {type(item).__name__} without parentheses")
    if not (isinstance(item, type) and issubclass(item, Transformation)):
        raise PluginLoadError(f"{found}, expected a subclass of fxopt_core.Transformation")
    if inspect.isabstract(item):
        raise PluginLoadError(f"{found}, which is abstract; implement {', '.join(sorted(item.__abstractmethods__))}")
    required = [option.name for option in options_of(item).values() if option.required]
    if required:
        raise PluginLoadError(f"{found}, whose constructor needs {', '.join(required)}; give every parameter a default")
    return item


def _pass_info(cls: type[Transformation], source: PluginSource) -> PassInfo:
    return PassInfo(
        name=_checked_name(pass_name(cls), "pass"),
        summary=inspect.cleandoc(cls.__doc__ or "").partition("\n")[0],
        family=source.name,
        distribution=source.distribution,
        version=source.version,
        reversible=cls.reversible,
        preserves_computation=bool(cls.preserves_computation),
        options=options_of(cls),
        transformation=cls,
    )


def _checked_pipelines(result: object) -> dict[str, str]:
    if not isinstance(result, Mapping):
        raise PluginLoadError(f"hook fxopt_pipelines returned {_described(result)}, expected a mapping of texts")
    return {_checked_name(name, "pipeline"): _checked_text(name, text) for name, text in result.items()}


def _checked_text(name: object, text: object) -> str:
    if not isinstance(text, str):
        raise PluginLoadError(f"pipeline {name!r} is {_described(text)}, expected pipeline text")
    try:
        parse_pipeline(text)
    except PipelineSyntaxError as error:
        raise PluginLoadError(f"pipeline {name!r} cannot be read: {error}") from error
    return text


def _checked_name(name: object, kind: str) -> str:
    if not (isinstance(name, str) and NAME.fullmatch(name)):
        raise PluginLoadError(f"{name!r} is no name for a {kind}; use letters, digits and dashes (`merge-linears`)")
    return name


def _described(value: object) -> str:
    if value is None:
        return "None"
    return f"the class {class_path(value)}" if isinstance(value, type) else f"a {class_path(type(value))}"


def _implementations(plugin: object) -> dict[str, Callable[[], object]]:
    """Return the hooks of a plugin; raise where one is misspelt, unmarked, or cannot be called as a hook is."""
    found: dict[str, Callable[[], object]] = {}
    close: list[str] = []
    for name in dir(plugin):
        function: Any = getattr(plugin, name, None)
        marks = getattr(function, f"{PROJECT}_impl", None)  # as pluggy sets it
        similar = difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.8) if not name.startswith("__") else []
        if name in HOOKS and not callable(function):
            raise PluginLoadError(f"{name} is {type_text(function)}, expected a function; {_MARK}")
        if name in HOOKS and not marks:
            raise PluginLoadError(f"{name} is not marked as a hook; {_MARK}")
        if name not in HOOKS and similar:
            close.append(f"; {name} looks like {similar[0]} misspelt")
        if marks:
            found[name] = function
            _check_hook(plugin, name, function, "".join(close), wraps=marks["wrapper"] or marks["hookwrapper"])
    if not found:
        raise PluginLoadError(f"it has no hooks; define one of {', '.join(HOOKS)} in it and {_MARK}{''.join(close)}")
    return found


def _check_hook(plugin: object, name: str, function: Callable[[], object], close: str, *, wraps: bool) -> None:
    found, remedy = "", "expected a plain function"
    parameters = ", ".join(inspect.signature(function).parameters)
    if name not in HOOKS:
        found, remedy = f"is unknown{close}", f"the hooks are {', '.join(HOOKS)}"
    elif wraps:
        found = "is a wrapper, which has nothing to wrap here"
    elif inspect.iscoroutinefunction(function):
        found = "is a coroutine, which nobody awaits"
    elif parameters and isinstance(plugin, type):
        cls = plugin.__qualname__
        found, remedy = f"is a method of {cls}", f"give an object, {cls}(), or make it static"
    elif parameters:
        found, remedy = f"has parameters ({parameters})", "hooks have none"
    if found:
        raise PluginLoadError(f"hook {name} {found}; {remedy}")
