"""Stand-in for a torchvision that is installed and does not load, for tests of libraries that import it."""

from __future__ import annotations

import importlib
import sys
import types

import pytest


@pytest.fixture(scope="session")
def loadable_torchvision():
    """Let libraries import ``torchvision``, or the few of its names that they take on import.

    A build of torchvision for another torch raises on import. Nothing of it runs in these tests.
    """
    try:
        importlib.import_module("torchvision")
    except (ImportError, RuntimeError):
        for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
            del sys.modules[name]
        yield from _stubs()
    else:
        yield


def _stubs():
    class Anything:
        """Whatever a library takes out of torchvision."""

    class Stub(types.ModuleType):
        def __getattr__(self, name):
            if name.startswith("__"):
                raise AttributeError(name)
            return type(name, (Anything,), {})

    names = ["", ".ops", ".ops.misc", ".transforms", ".transforms.functional", ".models", ".datasets", ".io"]
    names += [".models.feature_extraction", ".transforms.v2", ".transforms.v2.functional"]
    stubs = {f"torchvision{name}": Stub(f"torchvision{name}") for name in names}
    for stub in stubs.values():
        stub.__path__ = []
        stub.__spec__ = importlib.machinery.ModuleSpec(stub.__name__, None, is_package=True)
    sys.modules.update(stubs)
    yield
    for name in stubs:
        sys.modules.pop(name, None)
