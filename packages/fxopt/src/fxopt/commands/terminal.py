"""What a command shows: in a terminal with colours and frames, elsewhere as plain text that scripts can cut."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fxopt.commands.progress import Steps, silent, steps_shown

_STYLES = {"+": "green", "-": "red", "@": "cyan"}


class Terminal:
    """Standard output and standard error as they were when the command began.

    Attributes:
        out: where results go.
        err: where progress, notes and errors go.
    """

    def __init__(self) -> None:
        self.out = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
        self.err = Console(file=sys.stderr, highlight=False, markup=False, soft_wrap=True)

    def steps(self, seconds: Mapping[str, float]) -> AbstractContextManager[Steps]:
        """Show progress on standard error where that is a terminal.

        Args:
            seconds: the steps in order, each with the seconds that it takes about; they only have to be in proportion.
        """
        return steps_shown(self.err, seconds) if self.err.is_terminal else silent()

    def print(self, text: str = "", style: str | None = None) -> None:
        """Print a text as it is."""
        self.out.print(Text(text, style=style or ""))

    def note(self, text: str) -> None:
        """Print a text on standard error."""
        self.err.print(Text(text))

    def raw(self, text: str) -> None:
        """Print a text without colours or wrapping, for scripts."""
        self.out.file.write(f"{text}\n")
        self.out.file.flush()

    def error(self, message: str) -> None:
        """Print an error."""
        self.err.print(Text.assemble(("error: ", "bold red"), message))

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]], *, title: str | None = None) -> None:
        """Print a table: framed, and as wide as the terminal allows; elsewhere columns two spaces apart."""
        if not self.out.is_terminal:
            self.print("\n".join([*([title] if title else []), *plain_table([headings, *rows])]))
            return
        table = Table(*headings, title=title, title_justify="left", box=box.SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            table.add_row(*map(Text, row))
        self.out.print(table, soft_wrap=False)

    def changes(self, lines: Sequence[str]) -> None:
        """Print lines of a difference, coloured by their first character."""
        for line in lines:
            self.print(line, style=_STYLES.get(line[:1]))


def plain_table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a table.

    >>> plain_table([("pass", "family"), ("merge-linears", "linear")])
    ['pass           family', 'merge-linears  linear']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
