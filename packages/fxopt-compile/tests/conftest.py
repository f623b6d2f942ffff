"""What the tests share: modules beside them, the same random numbers for each, and a dynamo that remembers nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from fxopt_compile.backend import GRAPHS

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def afresh() -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    GRAPHS.clear()  # of former tests, which wait for the garbage collector
