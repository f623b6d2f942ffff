"""Register the folders that fxopt writes with transformers, wherever fxopt is installed.

transformers has no entry points: a type of model is known only once it has been registered. torch has a group of entry
points, ``torch.backends``, called at the end of ``import torch``. `autoload` is one; ``import fxopt`` calls it too.
It imports neither torch nor transformers. If nothing ever imports the classes ``AutoModel...`` of transformers, it has
no effect; ``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` turns the entry point off, but not the call by ``import fxopt``.

If an entry point raised, so would ``import torch``, in every script on the machine. So nothing here raises, and
nothing imports ``fxopt``, because a file of that name may be beside the script.
"""

from __future__ import annotations

import copy
import importlib
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

#: The module of the classes `AutoModel...`: nothing can be registered before it has run.
_AWAITED = "transformers.models.auto.modeling_auto"


def autoload() -> None:
    """Register with transformers: now, or once it has loaded its classes ``AutoModel...``."""
    if _AWAITED in sys.modules:
        _register()
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        # Before Python's own finders, which would load the module without it.
        sys.meta_path.insert(0, _Waiting())


class _Waiting(MetaPathFinder):
    """Finds one module, as Python does, and has fxopt registered after it was run."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of the awaited module, whose loader registers fxopt; None for all others."""
        if fullname != _AWAITED:
            return None
        with suppress(ValueError):
            sys.meta_path.remove(self)
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = copy.copy(spec.loader)  # all modules of a zip file have one
            run = spec.loader.exec_module

            def run_and_register(module: ModuleType) -> None:
                run(module)
                _register()

            with suppress(AttributeError):  # a loader that takes no attributes
                spec.loader.exec_module = run_and_register  # type: ignore[method-assign]  # of this copy alone
        return spec


def _register() -> None:
    try:
        importlib.import_module("_fxopt_entry_points.auto_classes").register()
    except Exception as error:  # another transformers, which has to stay usable
        found = f"{type(error).__name__}: {error}"
        message = f"folders that fxopt wrote cannot be opened with this version of transformers: {found}"
        with suppress(RuntimeWarning):  # where warnings are errors
            warnings.warn(message, RuntimeWarning, stacklevel=2)
