"""The conformance kit for passes of fxopt: what scikit-learn's ``check_estimator`` is for estimators.

`check_transformation` tries a pass on a zoo of models and checks what every pass has to keep. Importing this package
loads nothing yet, so that its pytest plugin costs other test runs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fxopt_testing.assertions import (
        assert_code as assert_code,
        assert_left_alone as assert_left_alone,
        assert_rewrites as assert_rewrites,
        code_of as code_of,
    )
    from fxopt_testing.cases import ModelCase as ModelCase
    from fxopt_testing.conformance import check_transformation as check_transformation, passes_of as passes_of
    from fxopt_testing.findings import (
        ConformanceError as ConformanceError,
        ConformanceReport as ConformanceReport,
        Finding as Finding,
    )
    from fxopt_testing.models import model_case as model_case, zoo as zoo
    from fxopt_testing.plugin import conformance_tests as conformance_tests
    from fxopt_testing.properties import PROPERTIES as PROPERTIES, Property as Property

__version__ = "0.1.0"

_HOMES = {
    "assertions": ("assert_code", "assert_left_alone", "assert_rewrites", "code_of"),
    "cases": ("ModelCase",),
    "conformance": ("check_transformation", "passes_of"),
    "findings": ("ConformanceError", "ConformanceReport", "Finding"),
    "models": ("model_case", "zoo"),
    "plugin": ("conformance_tests",),
    "properties": ("PROPERTIES", "Property"),
}
_MODULES = {name: module for module, names in _HOMES.items() for name in names}

__all__ = [
    "PROPERTIES",
    "ConformanceError",
    "ConformanceReport",
    "Finding",
    "ModelCase",
    "Property",
    "assert_code",
    "assert_left_alone",
    "assert_rewrites",
    "check_transformation",
    "code_of",
    "conformance_tests",
    "model_case",
    "passes_of",
    "zoo",
]


def __getattr__(name: str) -> object:
    """Load a name on first use.

    Raises:
        AttributeError: There is no such name.
    """
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found: object = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    """List all names, loaded or not."""
    return sorted({*globals(), *__all__})
