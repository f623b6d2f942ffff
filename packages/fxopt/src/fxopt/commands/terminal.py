"""The output of a command: colours and frames in a terminal, plain text elsewhere."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

# The control characters C0, DEL and C1, but for tabs and line feeds.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_TALKATIVE = ("torchao", "torch.utils._pytree", "torch.onnx._internal.exporter._registration")

#: Announces the next step of a work that takes long.
Step = Callable[[str], None]


def silence_libraries() -> None:
    """Keep libraries from warning, on import, of missing parts that nothing here needs.

    If torch is not imported yet, it will log only errors, unless ``TORCH_LOGS`` says otherwise.
    """
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    # torch.export logs a traceback for each failed attempt, which `capture` handles.
    os.environ.setdefault("TORCH_LOGS", "-all")


class Terminal:
    """Standard output and standard error, as they were when the command began.

    Attributes:
        out: for results.
        err: for progress, notes and errors.
    """

    def __init__(self) -> None:
        self.out = Console(file=sys.stdout, highlight=False, markup=False, soft_wrap=True)
        self.err = Console(file=sys.stderr, highlight=False, markup=False, soft_wrap=True)

    @contextmanager
    def steps(self) -> Iterator[Step]:
        """Show the present step of the ``with`` block where standard error is a terminal; the first one loads torch."""
        with self.err.status("loading torch") as status:
            yield status.update

    def print(self, text: str = "", style: str | None = None) -> None:
        """Print a text as it is."""
        self.out.print(Text(text, style=style or ""))

    def raw(self, text: str) -> None:
        """Print a text without colours or wrapping, for scripts."""
        self.out.file.write(f"{_writable(text)}\n")
        self.out.file.flush()

    def error(self, message: str) -> None:
        """Print an error."""
        self.err.print(Text.assemble(("error: ", "bold red"), _writable(message)))

    def table(self, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        """Print a table: framed, and as wide as the terminal allows; elsewhere columns two spaces apart."""
        if not self.out.is_terminal:
            from fxopt_core import text_table

            self.print("\n".join(text_table([headings, *rows])))
            return
        table = Table(*headings, box=box.SIMPLE_HEAD, pad_edge=False)
        for row in rows:
            table.add_row(*map(Text, row))
        self.out.print(table, soft_wrap=False)


def _writable(text: str) -> str:
    r"""Return text without characters that no encoding has, and without control characters for terminals.

    >>> _writable("a" + chr(0xD800) + chr(27) + "[2J")
    'a\\ud800\\x1b[2J'
    """
    plain = text.encode("utf-8", "backslashreplace").decode()
    return _CONTROL.sub(lambda found: repr(found[0])[1:-1], plain)
