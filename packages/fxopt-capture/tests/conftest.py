"""Optional libraries, past a torchvision that does not load; a graph module that many tests read, and its archive."""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from padded_linears import PadOutputs, Perceptron
from stand_ins import stand_in_for
from torch.fx import GraphModule

from fxopt_capture import capture, save
from fxopt_core import faithful_copy


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


@pytest.fixture(scope="session")
def perceptron() -> GraphModule:
    """Return a graph module that no test changes."""
    torch.manual_seed(0)
    return capture(Perceptron(), torch.randn(2, 4))


@pytest.fixture
def padded(perceptron: GraphModule) -> GraphModule:
    """Return one with a ledger."""
    return PadOutputs()(faithful_copy(perceptron))


@pytest.fixture(scope="session")
def archive(perceptron: GraphModule) -> bytes:
    """Return an archive with a ledger."""
    file = BytesIO()
    save(PadOutputs()(faithful_copy(perceptron)), file)
    return file.getvalue()


@pytest.fixture
def path(archive: bytes, tmp_path: Path) -> Path:
    """Return the file of an archive with a ledger."""
    path = tmp_path / "model.fxopt"
    path.write_bytes(archive)
    return path


@pytest.fixture
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield
