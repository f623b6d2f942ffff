"""Plain text tables."""

from __future__ import annotations

from collections.abc import Collection, Sequence


def text_table(rows: Sequence[Sequence[str]], *, right: Collection[int] = ()) -> list[str]:
    """Return the lines of a table; its columns are two spaces apart, and no line ends in a space.

    Args:
        rows: the cells, headings first; all rows have the same length.
        right: indices of the right-aligned columns.

    >>> text_table([("pass", "runs", ""), ("merge-linears", "2", "new")], right=[1])
    ['pass           runs', 'merge-linears     2  new']
    """
    columns = []
    for place, cells in enumerate(zip(*rows, strict=True)):
        width = max(map(len, cells))
        columns.append([cell.rjust(width) if place in right else cell.ljust(width) for cell in cells])
    return ["  ".join(row).rstrip() for row in zip(*columns, strict=True)]
