"""Stand-ins for packages that something imports and no test needs."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class StandInClass(type):
    """A class whose every public attribute is a string of its own, as the members of an enumeration are told apart."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__name__}.{name}"


class StandIn(ModuleType):
    """A module whose every public attribute is a class: enough to import what only names it."""

    def __getattr__(self, name: str) -> StandInClass:
        if name.startswith("__"):
            raise AttributeError(name)
        made = StandInClass(name, (), {})
        setattr(self, name, made)
        return made


class StandInFinder(MetaPathFinder, Loader):
    """Finds a stand-in for a package and for each of its submodules."""

    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A specification, if the name is of this package."""
        mine = fullname.partition(".")[0] == self.package
        return ModuleSpec(fullname, self, is_package=True) if mine else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """An empty stand-in."""
        return StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing is run."""


@contextmanager
def stand_in_for(package: str) -> Iterator[None]:
    """While open, imports of the package give stand-ins; afterwards it is as absent as before."""
    finder = StandInFinder(package)
    sys.meta_path.insert(0, finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
