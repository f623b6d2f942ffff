"""What the tests share: modules beside them, and a count of steps, for what has to be linear."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fxopt_testing.steps import count_steps

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def steps_of() -> Callable[[Callable[[], object]], int]:
    """Count what a function does: the same on every machine, where the time it takes is not."""
    return count_steps
