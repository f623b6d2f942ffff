"""The page of refusals lists every reason code with its meaning and remedy."""

from __future__ import annotations

from pathlib import Path

from fxopt_core import REASONS

PAGE = Path(__file__).parent.parent / "docs" / "refusals.md"


def test_every_code_is_listed_with_what_to_do() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    assert rows == [f"| `{code}` | {meaning} |" for code, meaning in REASONS.items()]
