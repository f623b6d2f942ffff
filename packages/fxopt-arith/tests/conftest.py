"""Lets the tests import what they share, which stands beside them, and gives each the same random numbers."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
