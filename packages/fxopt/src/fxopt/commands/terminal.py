"""The output of a command: colours and frames in a terminal, plain text elsewhere."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stderr
from typing import Any, TextIO, cast

from rich import box
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_TALKATIVE = ("torchao", "torch.utils._pytree", "torch.onnx._internal.exporter._registration")
_FX_TRACE = "Call using an FX-traced Module"


def silence_libraries() -> None:
    """Keep libraries from warning, on import, of missing parts that nothing here needs.

    If torch is not imported yet, it will log only errors, unless ``TORCH_LOGS`` says otherwise.
    """
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.ERROR)
    os.environ.setdefault("TORCH_LOGS", "-all")


class _WithoutTraces:
    """Standard error without the traceback that torch.fx prints before it raises an error in a graph."""

    def __init__(self, stream: TextIO) -> None:
        self._stream, self._dropped = stream, False

    def write(self, text: str) -> int:
        """Write a text unless it is such a traceback, or the end of its line."""
        dropped = _FX_TRACE in text or (self._dropped and text == "\n")
        self._dropped = dropped and text != "\n"
        return len(text) if dropped else self._stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Steps:
    """Work in a few long steps, shown as a progress bar.

    >>> with Progress(disable=True) as progress:
    ...     step = Steps(progress, 2)
    ...     step("reading")
    ...     step("measuring")
    ...     step.part(1, 4)
    ...     progress.tasks[0].description, progress.tasks[0].completed, progress.tasks[0].total
    ('measuring', 1.25, 2)
    """

    def __init__(self, progress: Progress, count: int) -> None:
        self._progress, self._done = progress, -1
        self._task = progress.add_task("", total=count)

    def __call__(self, step: str) -> None:
        """Begin the next step."""
        self._done += 1
        self._progress.update(self._task, completed=self._done, description=step, refresh=True)

    def part(self, done: int, total: int) -> None:
        """Show how much of the current step is done."""
        self._progress.update(self._task, completed=self._done + done / total)


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
    def steps(self, count: int, *, hidden: bool = False) -> Iterator[Steps]:
        """Show the progress of the ``with`` block on standard error where that is a terminal.

        Args:
            count: how many steps there are, the first included, which loads torch.
            hidden: whether not to show it in a terminal either.
        """
        columns = SpinnerColumn(), TextColumn("{task.description}", markup=False), BarColumn()
        times = TimeElapsedColumn(), TimeRemainingColumn(), TextColumn("left")
        quiet = hidden or not self.err.is_terminal
        with Progress(
            *columns, *times, console=self.err, transient=True, redirect_stdout=False, disable=quiet
        ) as progress:
            step = Steps(progress, count)
            step("loading torch")
            stream = _WithoutTraces(sys.stderr)  # which the progress bar may have replaced
            with redirect_stderr(cast("TextIO", stream)):
                yield step

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
