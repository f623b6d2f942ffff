"""What the tests share: a dynamo that remembers nothing."""

from __future__ import annotations

import pytest
import torch

from fxopt_compile.backend import GRAPHS


@pytest.fixture(autouse=True)
def afresh() -> None:
    torch._dynamo.reset()
    GRAPHS.clear()  # of former tests, which wait for the garbage collector
