"""What the tests share: a count of steps, for what has to be linear."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from step_counts import count_steps


@pytest.fixture
def steps_of() -> Callable[[Callable[[], object]], int]:
    """Count what a function does: the same on every machine, where the time it takes is not."""
    return count_steps
