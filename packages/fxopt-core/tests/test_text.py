"""Plain text tables."""

from __future__ import annotations

from fxopt_core import text_table


def test_columns_are_aligned_and_no_line_ends_in_a_space() -> None:
    lines = text_table([("a", "number", ""), ("long", "7", "x"), ("b", "1000", "")], right=[1])
    assert lines == ["a     number", "long       7  x", "b       1000"]


def test_the_last_column_pushes_nothing_and_long_cells_stick_out() -> None:
    lines = text_table([("a", "b", "c"), ("1234567890", "x", "y" * 100), ("1", "2", "3")], widest=4)
    assert lines == ["a     b  c", f"1234567890  x  {'y' * 100}", "1     2  3"]


def test_a_single_row_and_column() -> None:
    assert text_table([("a",)]) == ["a"]
