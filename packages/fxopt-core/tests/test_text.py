"""Plain text tables."""

from __future__ import annotations

from fxopt_core import text_table


def test_columns_are_aligned_and_no_line_ends_in_a_space() -> None:
    lines = text_table([("a", "number", ""), ("long", "7", "x"), ("b", "1000", "")], right=[1])
    assert lines == ["a     number", "long       7  x", "b       1000"]
