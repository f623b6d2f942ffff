"""What every test shares: the numbers that torch draws are the same in each run."""

from __future__ import annotations

import os

import pytest
import torch

SEED = int(os.environ.get("FXOPT_TEST_SEED", "0"))


def pytest_collectstart() -> None:
    """Seed what a module of tests draws while it is imported."""
    torch.manual_seed(SEED)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed what a test and its fixtures draw, whichever tests ran before it."""
    torch.manual_seed(SEED)
