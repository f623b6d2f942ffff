"""What the tests share: modules beside them, and the same random numbers for each."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)
