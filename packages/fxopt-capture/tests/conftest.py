"""Imports for tests: optional libraries past a torchvision that does not load."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
from types import ModuleType
from typing import Any

import pytest
from stand_ins import stand_in_for


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


@pytest.fixture(scope="session")
def timm() -> Any:
    """Return timm; it takes names from torchvision on import, which nothing in these tests uses."""
    with contextlib.nullcontext() if _torchvision_loads() else stand_in_for("torchvision"):
        return pytest.importorskip("timm")
