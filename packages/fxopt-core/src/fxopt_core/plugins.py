"""One plugin: what it offers, read and checked in full, so that nothing of it can break the registry later."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from fxopt_core import listing
from fxopt_core.encoding import class_name
from fxopt_core.errors import PassOptionError, PipelineSyntaxError, PluginLoadError
from fxopt_core.naming import NAME, kebab_case
from fxopt_core.options import OptionInfo, checked_options, construct, options_of
from fxopt_core.pipeline import parse_pipeline
from fxopt_core.plugin_hooks import implementations
from fxopt_core.transformation import ReversibleTransformation, Transformation


@dataclass(frozen=True)
class PluginSource:
    """Where a plugin comes from.

    Attributes:
        name: its entry-point name, or the name that it was registered under.
        distribution: the distribution that declares the entry point; empty for a registered one.
        version: the version of that distribution.
    """

    name: str
    distribution: str = ""
    version: str = ""

    def __str__(self) -> str:
        """Name plugin and distribution."""
        origin = (
            f"of {self.distribution} {self.version}".rstrip() if self.distribution else "registered in this process"
        )
        return f"{self.name!r} ({origin})"


@dataclass(frozen=True)
class PassInfo:
    """What is known of a pass that a plugin offers.

    Attributes:
        name: its name in kebab-case.
        summary: the first line of its docstring.
        family: the entry-point name of the plugin that offers it.
        distribution: the distribution of that plugin; empty for one that was registered by hand.
        version: the version of that distribution.
        reversible: whether it can be undone.
        preserves_computation: whether its result computes what the input did.
        options: its options by parameter name, with types and defaults.
        transformation: its class.
    """

    name: str
    summary: str
    family: str
    distribution: str
    version: str
    reversible: bool
    preserves_computation: bool
    options: Mapping[str, OptionInfo] = field(hash=False)
    transformation: type[Transformation]

    def __str__(self) -> str:
        """Tell all of it, the options one line each."""
        return listing.pass_listing(self)

    def create(self, options: Mapping[str, object]) -> Transformation:
        """Return a pass with these options, named in snake_case or kebab-case.

        Raises:
            PassOptionError: the pass has no such option, or does not take such a value.
        """
        checked = checked_options(self.name, self.options, options)
        try:
            created = construct(self.transformation, checked)
        except Exception as error:
            message = f"pass {self.name!r} refused its options: {type(error).__name__}: {error}"
            raise PassOptionError(message) from error
        if not isinstance(created, Transformation):
            raise PassOptionError(f"pass {self.name!r} made an object of type {class_name(type(created))}, no pass")
        return created


@dataclass(frozen=True)
class PluginOffer:
    """What a plugin offers.

    Attributes:
        source: where it comes from.
        passes: its passes; two of them may still claim one name.
        pipelines: its named pipelines, text by name.
    """

    source: PluginSource
    passes: tuple[PassInfo, ...]
    pipelines: Mapping[str, str] = field(hash=False)


def read_plugin(load: Callable[[], object], source: PluginSource) -> PluginOffer:
    """Load a plugin, call each of its hooks alone, and read and check the results to the end.

    Args:
        load: returns the plugin: a module, or any other object with marked functions.
        source: where it comes from.

    Raises:
        PluginLoadError: it could not be imported, offers nothing, or offers something wrong; a cause is chained.
    """
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
    for hook, function in implementations(plugin, source.name):
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
    if not (isinstance(item, type) and issubclass(item, Transformation)):
        if isinstance(item, Transformation):
            raise PluginLoadError(
                f"{found}, expected the class itself: write {type(item).__name__} without parentheses"
            )
        if callable(item) and not isinstance(item, type):
            raise PluginLoadError(
                f"{found}, expected a subclass of fxopt_core.Transformation; @fxopt_core.from_function makes one of a "
                "function"
            )
        raise PluginLoadError(f"{found}, expected a subclass of fxopt_core.Transformation")
    if inspect.isabstract(item):
        missing = ", ".join(sorted(item.__abstractmethods__))
        raise PluginLoadError(f"{found}, which is abstract; implement {missing}")
    required = [option.name for option in options_of(item).values() if option.required]
    if required:
        raise PluginLoadError(
            f"{found}, whose constructor needs {', '.join(required)}; give every parameter a default, so that the pass "
            "can be made from its name alone"
        )
    return item


def _pass_info(cls: type[Transformation], source: PluginSource) -> PassInfo:
    summary = inspect.cleandoc(cls.__doc__ or "").partition("\n")[0]
    return PassInfo(
        name=_checked_name(pass_name(cls), "pass"),
        summary=summary,
        family=source.name,
        distribution=source.distribution,
        version=source.version,
        reversible=issubclass(cls, ReversibleTransformation),
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
    return f"the class {class_name(value)}" if isinstance(value, type) else f"a {class_name(type(value))}"
