"""The registry: which passes, named pipelines, layers and functions the installed plugins offer.

Plugins are entry points of the group ``fxopt``. They are loaded on first use, one at a time, so that a broken one
breaks nothing else: it is listed in `Registry.failed`. A name that two plugins claim goes to the part of fxopt, if
exactly one of them is, and otherwise to neither.
"""

from __future__ import annotations

import importlib.metadata
import os
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.metadata import EntryPoint
from types import MappingProxyType
from typing import Any, TypeVar

from torch import nn

from fxopt_core.errors import DuplicatePassError, PluginLoadError, RegistryError, UnknownPassError
from fxopt_core.names import providers
from fxopt_core.naming import close_names, kebab_case
from fxopt_core.passes.compose import compose
from fxopt_core.passes.transformation import Transformation
from fxopt_core.registry.hookspec import PROJECT, Plugin
from fxopt_core.registry.pass_info import PassInfo
from fxopt_core.registry.pipeline import format_pipeline, pipeline_passes
from fxopt_core.registry.plugins import Offer, PluginSource, read_plugin, source_of
from fxopt_core.registry.shipped import SHIPPED_NAMES

#: Environment variable: entry-point names to load, separated by commas. Unset: all; empty: none.
ALLOW_LIST = "FXOPT_PLUGINS"


_KINDS: dict[type, str] = {str: "as a pipeline ", PassInfo: "as a pass "}
_Item = TypeVar("_Item")


def _settle(claims: Mapping[str, Sequence[tuple[PluginSource, _Item]]]) -> tuple[dict[str, _Item], dict[str, str]]:
    """Give each name to its one claimant, or to the one that is part of fxopt; return also why others are contested."""
    given: dict[str, _Item] = {}
    contested: dict[str, str] = {}
    for name, claimed in sorted(claims.items()):
        first, *others = sorted(claimed, key=lambda claim: not claim[0].shipped)
        is_kept = not others or first[0].shipped > others[0][0].shipped
        if is_kept:
            given[name] = first[1]
        if others:
            claimants = " and ".join([f"{_KINDS.get(type(item), '')}by plugin {source}" for source, item in claimed])
            result = "and stays with the part of fxopt" if is_kept else "so that no plugin gets it"
            remedy = f"uninstall one, or leave it out of {ALLOW_LIST}"
            contested[name] = f"{name!r} is claimed {claimants}, {result}; {remedy}"
    return given, contested


class _Contents:
    """Everything that the plugins offer; never changed, but replaced when a plugin is registered."""

    def __init__(self, offers: Mapping[PluginSource, Offer], broken: Mapping[str, PluginLoadError]) -> None:
        self.offers = offers
        self.broken = broken  # what could not be read, and names that several plugins have
        claims: defaultdict[str, list[tuple[PluginSource, PassInfo | str]]] = defaultdict(list)
        for source, offer in self.offers.items():
            for name, item in offer.items:
                claims[name].append((source, item))
        self.names, self.contested = _settle(claims)
        lost: defaultdict[str, dict[str, None]] = defaultdict(dict)
        for name, text in self.contested.items():
            for source, item in claims[name]:
                if self.names.get(name) is not item:
                    lost[source.name][text] = None
        failed = {**self.broken, **{name: _clash("; ".join(texts)) for name, texts in lost.items()}}
        self.failed = MappingProxyType(dict(sorted(failed.items())))


def _clash(text: str) -> PluginLoadError:
    error = PluginLoadError(text)
    error.__cause__ = DuplicatePassError(text)
    return error


def _read(points: Iterable[EntryPoint]) -> _Contents:
    """Load the plugins that the allow-list names; an error in one of them concerns only that one."""
    by_name: defaultdict[str, list[tuple[PluginSource, EntryPoint]]] = defaultdict(list)
    for point in points:
        by_name[point.name].append((source_of(point), point))
    value = os.environ.get(ALLOW_LIST)
    allowed = by_name.keys() if value is None else {name.strip() for name in value.split(",")}
    chosen, contested = _settle({name: by_name[name] for name in by_name.keys() & allowed})
    broken = {name: _clash(text) for name, text in contested.items()}
    offers: dict[PluginSource, Offer] = {}
    for name, point in chosen.items():
        source = source_of(point)
        try:
            offers[source] = read_plugin(point.load, source)
        except PluginLoadError as error:
            broken[name] = error
    return _Contents(offers, broken)


class Registry:
    """What plugins offer: passes, named pipelines, layers, functions; `registry` returns the one of this process.

    Args:
        entry_points: the plugins; if None, those of all installed distributions.

    >>> from fxopt_core import Transformation, hookimpl
    >>> class Noop(Transformation):
    ...     \"\"\"graph module -> the same one.\"\"\"
    ...     def __init__(self, *, times: int = 1) -> None:
    ...         self.times = times
    ...     def transform(self, graph_module):
    ...         return graph_module
    >>> class Plugin:
    ...     @hookimpl
    ...     def fxopt_transformations(self):
    ...         return [Noop]
    >>> passes = Registry(entry_points=[])
    >>> passes.register(Plugin())
    >>> passes
    fxopt registry: noop; failed: none
    >>> passes.pipeline_text(passes.pipeline("noop{times=2}, noop"))
    'noop{times=2},noop'
    """

    def __init__(self, entry_points: Iterable[EntryPoint] | None = None) -> None:
        self._entry_points = None if entry_points is None else tuple(entry_points)
        # Reentrant: a plugin that asks for the registry while it is loaded gets an error instead of a deadlock.
        self._lock = threading.RLock()
        self._loading = False
        self._loaded: _Contents | None = None

    def available(self) -> Mapping[str, PassInfo]:
        """Return all passes by name, sorted."""
        return MappingProxyType({n: i for n, i in self._contents().names.items() if not isinstance(i, str)})

    def pipelines(self) -> Mapping[str, str]:
        """Return all named pipelines by name, sorted."""
        return MappingProxyType({n: i for n, i in self._contents().names.items() if isinstance(i, str)})

    def layers(self) -> Mapping[str, type[nn.Module]]:
        """Return the layers that files may name besides those of ``torch.nn``, by ``"module:Class"``."""
        return MappingProxyType({n: each for o in self._contents().offers.values() for n, each in o.layers.items()})

    def functions(self) -> Mapping[str, Callable[..., Any]]:
        """Return the functions that files may name besides those of torch, by ``"module:name"``.

        An operator is named ``"torch:ops.namespace.name"``; each of its overloads appends ``".overload"``.
        """
        return MappingProxyType({n: each for o in self._contents().offers.values() for n, each in o.functions.items()})

    @property
    def failed(self) -> Mapping[str, PluginLoadError]:
        """Errors by plugin: it could not be loaded, or another one claims the same names."""
        return self._contents().failed

    def lookup(self, name: str) -> PassInfo | str:
        """Return the pass of this name, or the text of the pipeline of this name; raises as `create` does."""
        contents = self._contents()
        if name in contents.names:
            return contents.names[name]
        if name in contents.contested:
            raise DuplicatePassError(contents.contested[name])
        if name in contents.broken and isinstance(contents.broken[name].__cause__, DuplicatePassError):
            raise DuplicatePassError(str(contents.broken[name]))
        home = SHIPPED_NAMES.get(kebab_case(name), "")
        if home and home.removeprefix("fxopt-") not in {source.name for source in contents.offers}:
            hint = f": it is in {home}, which is not loaded; unless it is installed: pip install {home}"
        else:
            hint = close_names(name, contents.names) or "; print(registry()) or `fxopt list` shows those that are there"
        if contents.failed:
            hint += f"\n  these plugins failed, see registry().failed: {', '.join(contents.failed)}"
        if ALLOW_LIST in os.environ:
            hint += f"\n  {ALLOW_LIST} allows these plugins only: {os.environ[ALLOW_LIST]}"
        raise UnknownPassError(f"no pass or pipeline is named {name!r}{hint}")

    def info_of(self, cls: type[Transformation]) -> PassInfo:
        """Return the pass that a class is registered as, or raise an `UnknownPassError`."""
        for info in self.available().values():
            if info.transformation is cls:
                return info
        found = f"{cls.__qualname__} of {cls.__module__} is not registered, so that text cannot name it"
        raise UnknownPassError(f"{found}; offer it in a plugin's fxopt_transformations")

    def create(self, name: str, /, **options: object) -> Transformation:
        """Return the pass of this name.

        Args:
            name: name of the pass.
            **options: its options, in snake_case or kebab-case; literals are fitted to their annotations.

        Raises:
            UnknownPassError: no pass has this name; the message lists close names and plugins that failed.
            DuplicatePassError: several plugins claim it.
            PassOptionError: the pass has no such option, or does not accept the value.
        """
        found = self.lookup(name)
        if isinstance(found, str):
            raise UnknownPassError(f"{name!r} is a named pipeline, not a pass; make it with pipeline({name!r})")
        return found.create(options)

    def pipeline(self, text: str) -> Transformation:
        """Return the composition that a pipeline's text describes (see `fxopt_core.registry.pipeline`).

        Raises:
            PipelineSyntaxError: the text cannot be read, or gives a pass options that it does not take.
            RegistryError: a name in it is unknown or claimed twice, or a named pipeline contains itself.
        """
        return compose(*pipeline_passes(text, self.lookup))

    def pipeline_text(self, composition: Transformation) -> str:
        """Return the canonical text of a composition or a pass, or raise a `PassOptionError` or `UnknownPassError`."""
        return format_pipeline(composition, self.info_of)

    def register(self, plugin: Plugin, name: str | None = None) -> None:
        """Add a plugin that no entry point names; the allow-list does not matter to it.

        Args:
            plugin: a module, or any other object with marked hooks.
            name: name of the plugin; if None, the module's, or that of its type.

        Raises:
            PluginLoadError: the plugin is broken.
            DuplicatePassError: its name, or one that it offers, is taken. Nothing of it is registered then.
        """
        source = PluginSource(name or getattr(plugin, "__name__", None) or type(plugin).__name__)
        with self._lock:
            now = self._contents()
            known = {each.name: f"it is {each}" for each in now.offers} | {n: str(e) for n, e in now.broken.items()}
            if source.name in known:
                taken = f"a plugin is already named {source.name!r} ({known[source.name]})"
                raise DuplicatePassError(f"{taken}; register the other under another name")
            offer = read_plugin(lambda: plugin, source)
            extended = _Contents({**now.offers, source: offer}, now.broken)
            for name, _ in offer.items:
                if name in extended.contested:
                    raise DuplicatePassError(extended.contested[name])
            self._loaded = extended

    def __repr__(self) -> str:
        """Name passes, pipelines and failed plugins."""
        return f"fxopt registry: {', '.join(self._contents().names)}; failed: {', '.join(self.failed) or 'none'}"

    def _contents(self) -> _Contents:
        """Return the contents, loading plugins on the first call; a call from a plugin being loaded is an error."""
        with self._lock:
            if self._loading:
                raise RegistryError("a plugin asks for the registry while plugins are being loaded; ask in a pass")
            if self._loaded is None:
                self._loading = True
                try:
                    given = self._entry_points
                    self._loaded = _read(importlib.metadata.entry_points(group=PROJECT) if given is None else given)
                finally:
                    self._loading = False
            return self._loaded


_PROCESS_REGISTRY = Registry()


def registry() -> Registry:
    """Return the registry of this process; plugins are loaded on its first use."""
    return _PROCESS_REGISTRY


providers.append(lambda: registry().functions())
