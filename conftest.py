"""What all tests share: modules beside them, the same random numbers in each run, and little to collect."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent
SEED = int(os.environ.get("FXOPT_TEST_SEED", "0"))

sys.path[:0] = map(str, sorted(ROOT.glob("packages/*/tests")))


# A capture makes hundreds of thousands of objects that stay for a while; looking for garbage every 700 is in vain.
gc.set_threshold(10_000, 10, 10)


def pytest_collectstart() -> None:
    """Seed what a module of tests draws while it is imported."""
    seed()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Seed what a test and its fixtures draw, whichever tests ran before it."""
    seed()


@pytest.fixture(scope="module", autouse=True)
def settled(request: pytest.FixtureRequest) -> Iterator[None]:
    """Keep what is there before a module's tests, millions of objects, out of the collections that come with them.

    The trials of the conformance kit end with the module: the class of each graph module makes every trace slower.
    """
    gc.collect()
    gc.freeze()
    yield
    for item in request.session.items:
        if item.parent is request.node and isinstance(item, pytest.Function) and hasattr(item, "callspec"):
            for value in item.callspec.params.values():
                for each in value if isinstance(value, tuple) else (value,):
                    if isinstance(kept := getattr(each, "__dict__", None), dict):  # that of a class is none
                        kept.pop("trials", None)


@pytest.fixture
def steps_of() -> Callable[[Callable[[], object]], int]:
    """Count what a function does: the same on every machine, where the time it takes is not."""
    from step_counts import count_steps  # it needs torch

    return count_steps


@pytest.fixture
def frequent_switches() -> Iterator[None]:
    """Threads take turns often."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(interval)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder to work in."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def seed() -> None:
    """Seed torch's generator: `torch.manual_seed` formats a stack for each other kind of device too."""
    import torch  # only here: the process that hands out tests reads this file too, and has no use for torch

    torch.default_generator.manual_seed(SEED)
