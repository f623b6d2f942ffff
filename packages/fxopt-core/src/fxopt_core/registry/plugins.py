"""The plugins: each is read and checked in full, so that nothing of it can break the registry later.

`Offers` is what all of them offer, the names that several claim set aside.
"""

from __future__ import annotations

import difflib
import inspect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from types import FunctionType, MappingProxyType
from typing import NamedTuple

import pluggy

from fxopt_core.errors import DuplicatePassError, PipelineSyntaxError, PluginLoadError, UnknownPassError
from fxopt_core.naming import NAME, close_names, kebab_case
from fxopt_core.passes.options import options_of
from fxopt_core.passes.transformation import Transformation
from fxopt_core.registry.hookspec import PROJECT, PipelinesPlugin, TransformationsPlugin
from fxopt_core.registry.pass_info import PassInfo
from fxopt_core.registry.pipeline import parse_pipeline
from fxopt_core.values.names import class_path

ALLOW_LIST = "FXOPT_PLUGINS"
"""Environment variable: entry-point names to load, separated by commas. Unset: all; empty: none."""

HOOKS = ("fxopt_transformations", "fxopt_pipelines")
_MARK = "decorate it with @fxopt_core.hookimpl"


@dataclass(frozen=True)
class PluginSource:
    """The name of a plugin, and the distribution whose entry point it is; that is empty for a registered one."""

    name: str
    distribution: str = ""
    version: str = ""

    def __str__(self) -> str:
        origin = f"of {self.distribution} {self.version}".rstrip()
        return f"{self.name!r} ({origin if self.distribution else 'registered in this process'})"


@dataclass(frozen=True)
class PluginOffer:
    """The passes and named pipelines that a plugin offers; two of them may still claim one name."""

    source: PluginSource
    passes: tuple[PassInfo, ...]
    pipelines: Mapping[str, str] = field(hash=False)


class Offers:
    """What plugins offer at one time, the names that several of them claim set aside; never changed."""

    def __init__(
        self,
        offers: tuple[PluginOffer, ...],
        broken: Mapping[str, PluginLoadError],
        left_out: tuple[str, ...],
        missing: tuple[str, ...] = (),
    ) -> None:
        self.offers = offers
        self.broken = broken  # plugins that could not be read, and names that several plugins have
        self.left_out = left_out  # plugins that the allow-list leaves out
        self.plugins = frozenset({*(offer.source.name for offer in offers), *broken, *left_out})
        self.missing = tuple(name for name in missing if name not in self.plugins)  # on the allow-list, and no plugin's
        claims = _claims(offers)
        self.names = {name: claims[name][0].item for name in sorted(claims) if len(claims[name]) == 1}
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
            raise DuplicatePassError(clash_text(source.name, (*taken, source)))

    def _failures(self) -> dict[str, PluginLoadError]:
        messages: defaultdict[str, list[str]] = defaultdict(list)
        for name, claims in self._contested.items():
            for plugin in dict.fromkeys(claim.source.name for claim in claims):
                messages[plugin].append(_contest_text(name, claims))
        contested = {plugin: failure("; ".join(lines), lines[0]) for plugin, lines in messages.items()}
        return dict(sorted({**self.broken, **contested}.items()))

    def _unknown(self, name: str) -> str:
        hints = [f"registered are: {', '.join(self.names) or 'none'}"]
        if self.failed:
            hints.append(f"these plugins failed, see registry().failed: {', '.join(self.failed)}")
        if self.left_out:
            hints.append(f"{ALLOW_LIST} leaves out these plugins: {', '.join(self.left_out)}")
        if self.missing:
            hints.append(f"{ALLOW_LIST} names plugins that are not installed: {', '.join(self.missing)}")
        return f"no pass or pipeline is named {name!r}{close_names(name, self.names)}\n  " + "\n  ".join(hints)


class _Claim(NamedTuple):
    kind: str
    source: PluginSource
    item: PassInfo | str


def _claims(offers: Iterable[PluginOffer]) -> dict[str, list[_Claim]]:
    claims: defaultdict[str, list[_Claim]] = defaultdict(list)
    for offer in offers:
        for info in offer.passes:
            claims[info.name].append(_Claim("pass", offer.source, info))
        for name, text in offer.pipelines.items():
            claims[name].append(_Claim("pipeline", offer.source, text))
    return claims


def _contest_text(name: str, claims: Iterable[_Claim]) -> str:
    claimants = " and ".join(f"as a {claim.kind} by plugin {claim.source}" for claim in claims)
    return f"{name!r} is claimed {claimants}, so that nobody gets it; uninstall one, or leave it out of {ALLOW_LIST}"


def clash_text(name: str, sources: Iterable[PluginSource]) -> str:
    """Return that several plugins have one name."""
    claimants = " and ".join(map(str, sources))
    return f"several plugins are named {name!r}: {claimants}; uninstall one, or register it under another name"


def failure(message: str, cause: str) -> PluginLoadError:
    """Return the error of a plugin that shares a name with others."""
    error = PluginLoadError(message)
    error.__cause__ = DuplicatePassError(cause)
    return error


def read_plugin(load: Callable[[], object], source: PluginSource) -> PluginOffer:
    """Load a plugin, call each of its hooks alone, and read and check the results to the end."""
    try:
        return _read(load(), source)
    except PluginLoadError as error:
        raise PluginLoadError(f"plugin {source}: {error}") from error.__cause__
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # foreign code may raise anything: SystemExit, a cancelled task, a skipped test
        raise PluginLoadError(f"plugin {source} failed to load: {type(error).__name__}: {error}") from error


def pass_name(cls: type[Transformation]) -> str:
    """Return the name under which a pass is offered: its class name in kebab-case, or its own attribute ``name``."""
    own = inspect.getattr_static(cls, "name", None)
    return own if isinstance(own, str) else kebab_case(cls.__name__)


def _read(plugin: object, source: PluginSource) -> PluginOffer:
    passes: dict[type[Transformation], PassInfo] = {}
    pipelines: dict[str, str] = {}
    for hook, function in _implementations(plugin, source.name):
        result = function()
        if hook == "fxopt_transformations":
            passes.update(_checked_passes(result, source))
        else:
            pipelines.update(_checked_pipelines(result))
    return PluginOffer(source, tuple(passes.values()), pipelines)


def _checked_passes(result: object, source: PluginSource) -> dict[type[Transformation], PassInfo]:
    if not isinstance(result, Iterable) or isinstance(result, (str, bytes)):
        raise PluginLoadError(
            f"hook fxopt_transformations returned {_described(result)}, expected an iterable of Transformation classes"
        )
    return {cls: _pass_info(cls, source) for cls in map(_checked_class, result)}


def _checked_class(item: object) -> type[Transformation]:
    found = f"hook fxopt_transformations gave {_described(item)}"
    if isinstance(item, Transformation):
        raise PluginLoadError(f"{found}, expected the class itself: write {type(item).__name__} without parentheses")
    if not (isinstance(item, type) and issubclass(item, Transformation)):
        function = callable(item) and not isinstance(item, type)
        remedy = "; @fxopt_core.from_function makes one of a function" if function else ""
        raise PluginLoadError(f"{found}, expected a subclass of fxopt_core.Transformation{remedy}")
    if inspect.isabstract(item):
        raise PluginLoadError(f"{found}, which is abstract; implement {', '.join(sorted(item.__abstractmethods__))}")
    required = [option.name for option in options_of(item).values() if option.required]
    if required:
        raise PluginLoadError(
            f"{found}, whose constructor needs {', '.join(required)}; give every parameter a default, so that the pass "
            "can be made from its name alone"
        )
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
        raise PluginLoadError(
            f"hook fxopt_pipelines returned {_described(result)}, expected a mapping of names to pipeline text"
        )
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


def _implementations(plugin: object, name: str) -> list[tuple[str, Callable[[], object]]]:
    """Return the plugin's hooks with their functions.

    Each plugin has a manager of its own, so that a misspelt hook in one does not concern the others.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(TransformationsPlugin)
    manager.add_hookspecs(PipelinesPlugin)
    try:
        manager.register(plugin, name=name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        found_wrong = ", ".join(line.strip() for line in str(error).splitlines())
        hooks = " and ".join(f"{hook}()" for hook in HOOKS)
        raise PluginLoadError(
            f"{found_wrong}{_close_hooks(plugin)}; the hooks are {hooks}, without parameters"
        ) from error
    found = [(hook, impl) for hook in HOOKS for impl in getattr(manager.hook, hook).get_hookimpls()]
    _check_the_rest_is_unused(plugin, set(HOOKS).difference(hook for hook, _ in found))
    if not found:
        raise PluginLoadError(f"it has no hooks; define {' or '.join(HOOKS)} in it and {_MARK}{_close_hooks(plugin)}")
    for hook, impl in found:
        _check_can_be_called(plugin, hook, impl)
    return [(hook, impl.function) for hook, impl in found]


def _check_the_rest_is_unused(plugin: object, hooks: Iterable[str]) -> None:
    """Raise where something has the name of a hook and no mark: nobody would call it."""
    for hook in hooks:
        value = getattr(plugin, hook, None)
        if callable(value):
            raise PluginLoadError(f"{hook} is not marked as a hook; {_MARK}")
        if value is not None:
            raise PluginLoadError(f"{hook} is a {type(value).__qualname__}, expected a function; {_MARK}")


def _check_can_be_called(plugin: object, hook: str, impl: pluggy.HookImpl) -> None:
    if impl.wrapper or impl.hookwrapper:
        raise PluginLoadError(f"hook {hook} is a wrapper, which has nothing to wrap here; expected a plain function")
    if inspect.iscoroutinefunction(impl.function):
        raise PluginLoadError(f"hook {hook} is a coroutine, which nobody awaits; expected a plain function")
    if isinstance(plugin, type) and isinstance(inspect.getattr_static(plugin, hook), FunctionType):
        raise PluginLoadError(
            f"hook {hook} is a method of the class {plugin.__qualname__}, which is itself the plugin; give an object, "
            f"{plugin.__qualname__}(), or make it a static method"
        )


def _close_hooks(plugin: object) -> str:
    """Return which names of a plugin look like hooks with a slip, as a hint, or an empty text."""
    names = [name for name in dir(plugin) if name not in HOOKS and not name.startswith("__")]
    pairs = [(name, difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.8)) for name in names]
    return "".join(f"; {name} looks like {close[0]} misspelt" for name, close in pairs if close)
