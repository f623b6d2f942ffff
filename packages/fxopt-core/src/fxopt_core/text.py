"""Plain text tables."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence


def text_table(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), widest: int | None = None) -> list[str]:
    """Return the lines of a table; its columns are two spaces apart, and no line ends in a space.

    Args:
        rows: the cells, headings first; all rows have the same length.
        right: indices of the right-aligned columns.
        widest: the greatest width of a column; longer cells stick out.

    >>> print(*text_table([("pass", "runs"), ("merge-linears", "2")], right=[1]), sep="\\n")
    pass           runs
    merge-linears     2
    """
    lengths = [[len(cell) for cell in column] for column in zip(*rows, strict=True)]
    widths = [max(column) if widest is None else min(max(column), widest) for column in lengths]
    return ["  ".join(_aligned(cell, place, widths, right) for place, cell in enumerate(row)).rstrip() for row in rows]


def notebook_text(text: object) -> str:
    """Return HTML that shows text line by line in a notebook."""
    return f"<pre>{html.escape(str(text))}</pre>"


def _aligned(cell: str, place: int, widths: Sequence[int], right: Collection[int]) -> str:
    if place in right:
        return cell.rjust(widths[place])
    return cell if place == len(widths) - 1 else cell.ljust(widths[place])
