"""Every instruction set in turn, for tests that take `instructions`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fxopt_cpu.library import ISAS, isa, limit_isa

# By day: the others differ from these only in products of bfloat16 and int8.
DAILY = ("portable", "avx2", "avx512", isa())


@pytest.fixture(params=[pytest.param(name, marks=() if name in DAILY else pytest.mark.nightly) for name in ISAS])
def instructions(request: pytest.FixtureRequest) -> Iterator[str]:
    """Run the test with each instruction set that this processor has, and once without the library."""
    if isa() is None and request.param == ISAS[0]:
        yield "none"  # the references
        return
    before = isa()
    if before is None or limit_isa(request.param) != request.param:
        if before is not None:
            limit_isa(before)
        pytest.skip(f"{request.param}: this processor lacks it, or the library was not built")
    yield request.param
    limit_isa(before)
