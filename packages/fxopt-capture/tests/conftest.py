"""Imports for tests: optional libraries past a torchvision that does not load."""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Sequence
from types import ModuleType
from typing import Any

import pytest
from stand_ins import StandInClass


def _torchvision_loads() -> bool:
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):  # a build for another torch raises either
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        return False
    return True


@pytest.fixture(scope="session")
def transformers() -> ModuleType:
    """Return transformers, which does without torchvision where there is none that loads."""
    pytest.importorskip("transformers", minversion="5")
    if not _torchvision_loads():
        sys.modules["torchvision"] = None  # type: ignore[assignment]  # how Python marks what must not be imported
    module = importlib.import_module("transformers")
    module.utils.is_torchvision_available()  # looks once
    if sys.modules.get("torchvision") is None:
        sys.modules.pop("torchvision", None)
    module.logging.set_verbosity_error()
    return module


class _Stub(ModuleType):
    """A module in which every capitalized name is a class that does nothing, and every other one a module."""

    def __getattr__(self, name: str) -> StandInClass:
        if not name[0].isupper():
            raise AttributeError(name)
        return StandInClass(name, (), {})


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stub for every module of torchvision."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        is_stubbed = fullname.split(".")[0] == "torchvision"
        return importlib.machinery.ModuleSpec(fullname, self, is_package=True) if is_stubbed else None

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        return _Stub(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


@pytest.fixture(scope="session")
def timm() -> Any:
    """Return timm; it takes names from torchvision on import, which nothing in these tests uses."""
    if _torchvision_loads():
        return pytest.importorskip("timm")
    finder = _StubFinder()
    sys.meta_path.insert(0, finder)
    try:
        return pytest.importorskip("timm")
    finally:
        sys.meta_path.remove(finder)
        for name in [name for name, loaded in sys.modules.items() if isinstance(loaded, _Stub)]:
            del sys.modules[name]
