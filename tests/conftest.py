"""What the tests of the whole share."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

import pytest
from hypothesis import settings
from stand_ins import stand_in_for

# Thousands of models of tests/test_properties.py, other ones each night, and the faults of tests/test_faults.py.
settings.register_profile("nightly", max_examples=1500, deadline=None, print_blob=True)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print tables whose rows tests recorded under the table's header, whichever processes ran them."""
    tables: dict[str, list[str]] = {}
    for report in terminalreporter.stats.get("passed", []):
        for name, value in report.user_properties:
            if name.startswith("|"):
                tables.setdefault(name, []).append(value)
    for header, rows in tables.items():
        terminalreporter.section("table")
        for line in (header, "|---" * header.count(" | ") + "|---|", *rows):
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def timm() -> ModuleType:
    """timm, or a skip where it is not installed.

    timm imports torchvision for data sets and image transforms, which no model needs. A torchvision that matches the
    build of torch cannot be had everywhere, so a stand-in takes its place during that import alone.
    """
    if "timm" not in sys.modules and importlib.util.find_spec("timm") is None:
        pytest.skip("timm is not installed")
    with stand_in_for("torchvision"):
        return importlib.import_module("timm")
