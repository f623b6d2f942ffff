"""The page of refusals lists every reason code of the installed families with its meaning and remedy."""

from __future__ import annotations

from pathlib import Path

from fxopt_core import registry
from fxopt_rewrite import REASONS

PAGE = Path(__file__).parents[2] / "docs" / "refusals.md"


def test_every_code_is_listed_with_what_to_do() -> None:
    rows = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("| `")]
    own = {
        (code, info.family, meaning): None
        for info in registry().available().values()
        for code, meaning in info.transformation.reasons.items()
        if code not in REASONS
    }
    general = [f"| `{code}` | {meaning} |" for code, meaning in REASONS.items()]
    assert rows == general + [f"| `{code}` | {family} | {meaning} |" for code, family, meaning in sorted(own)]
