"""What `fxopt optimize` is asked for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Job:
    """The command line of `fxopt optimize`, option by option."""

    source: str
    pipeline: str
    output: str
    inputs: str | None
    seed: int
    verify: bool
    strict: bool
    expect: int | None
    rtol: float | None
    atol: float | None
    history: bool
    report: str | None
    reproducers: str | None
    force: bool
    run_pickled_code: bool
