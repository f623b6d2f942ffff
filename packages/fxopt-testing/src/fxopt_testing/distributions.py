"""The passes of an installed distribution, as its entry points offer them."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, distribution

from fxopt_core import PreconditionError, Registry, Transformation


def passes_of(name: str) -> tuple[Transformation, ...]:
    """Return all passes of an installed distribution, made with their defaults, by name.

    Only its own plugins are read, so that others cannot be in the way.

    Args:
        name: name of the distribution, such as "fxopt-linear".

    Raises:
        PreconditionError: It is not installed, or declares no plugin, or its plugins offer no pass.
        PluginLoadError: One of its plugins cannot be loaded; the cause is chained.
        PassOptionError: A pass cannot be made without options.

    >>> [each.name for each in passes_of("fxopt-core")]
    ['deep-copy', 'lint-and-recompile']
    """
    try:
        points = distribution(name).entry_points
    except PackageNotFoundError:
        raise PreconditionError(f"distribution {name!r} is not installed: pip install {name}") from None
    plugins = [point for point in points if point.group == "fxopt"]
    if not plugins:
        raise PreconditionError(
            f"distribution {name!r} declares no plugin of fxopt: its pyproject.toml needs "
            "[project.entry-points.fxopt]; install it again after changing that"
        )
    found = Registry(entry_points=plugins)
    for error in found.failed.values():
        raise error
    if not found.available():
        raise PreconditionError(f"the plugins of distribution {name!r} offer no pass")
    return tuple(found.create(name) for name in found.available())
