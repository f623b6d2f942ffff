"""The hooks of one plugin: found, and checked against the specifications, before any of them is called."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable
from types import FunctionType

import pluggy

from fxopt_core.errors import PluginLoadError
from fxopt_core.hookspec import PROJECT, PipelinesPlugin, TransformationsPlugin

HOOKS = ("fxopt_transformations", "fxopt_pipelines")
"""The hooks there are; both are called without arguments."""

_MARK = "decorate it with @fxopt_core.hookimpl"


def implementations(plugin: object, name: str) -> list[tuple[str, Callable[[], object]]]:
    """Return the plugin's hooks with their functions.

    A manager of its own for every plugin keeps them apart: a misspelt hook in one plugin is no matter of another.

    Args:
        plugin: a module, or any other object.
        name: the name of the plugin.

    Raises:
        PluginLoadError: There is no hook, or one that nobody would call.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(TransformationsPlugin)
    manager.add_hookspecs(PipelinesPlugin)
    try:
        manager.register(plugin, name=name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginLoadError(f"{_in_one_line(error)}{_close_hooks(plugin)}; {_expectation()}") from error
    found = [(hook, impl) for hook in HOOKS for impl in getattr(manager.hook, hook).get_hookimpls()]
    marked = {hook for hook, _ in found}
    _check_the_rest_is_unused(plugin, [hook for hook in HOOKS if hook not in marked])
    if not found:
        raise PluginLoadError(f"it has no hooks; define {' or '.join(HOOKS)} in it and {_MARK}{_close_hooks(plugin)}")
    for hook, impl in found:
        _check_can_be_called(plugin, hook, impl)
    return [(hook, impl.function) for hook, impl in found]


def _check_the_rest_is_unused(plugin: object, hooks: list[str]) -> None:
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


def _in_one_line(error: pluggy.PluginValidationError) -> str:
    return ", ".join(line.strip() for line in str(error).splitlines())


def _expectation() -> str:
    return f"the hooks are {' and '.join(f'{hook}()' for hook in HOOKS)}, without parameters"


def _close_hooks(plugin: object) -> str:
    """Return which names of a plugin look like hooks with a slip, as a hint, or an empty text."""
    names = [name for name in dir(plugin) if name not in HOOKS and not name.startswith("__")]
    pairs = [(name, difflib.get_close_matches(name, HOOKS, n=1, cutoff=0.8)) for name in names]
    return "".join(f"; {name} looks like {close[0]} misspelt" for name, close in pairs if close)
