"""scikit-build-core, with torch where there is none: its headers are compiled with, its library is linked to.

The environment that a wheel is built in apart has no torch. A torch of several gigabytes is not installed once more for
that: CMake finds the one of the environment that the wheel is for.
"""

from __future__ import annotations

import sysconfig
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from scikit_build_core import build as _build
from scikit_build_core.build import (
    build_editable,
    build_sdist,
    build_wheel,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
]


def get_requires_for_build_wheel(config_settings: dict[str, Any] | None = None) -> list[str]:
    """Return what to install for building a wheel."""
    return [*_build.get_requires_for_build_wheel(config_settings), *([] if torch_directory() else ["torch>=2.13"])]


def torch_directory() -> str | None:
    """Return where torch is: importable, or installed in the environment that this one was made for."""
    installed = Path(sysconfig.get_path("purelib"), "torch")
    if installed.is_dir():
        return str(installed)
    spec = find_spec("torch")
    return spec.submodule_search_locations[0] if spec and spec.submodule_search_locations else None


if __name__ == "__main__":
    print(torch_directory() or "")
