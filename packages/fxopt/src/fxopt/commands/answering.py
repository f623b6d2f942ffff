"""How every command runs: its work, then one answer, as text or as JSON, and an exit status."""

from __future__ import annotations

import json
import math
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from dataclasses import dataclass
from typing import Any

import typer

from fxopt.commands.exit_codes import ExitCode
from fxopt.commands.failures import CommandError, explained
from fxopt.commands.terminal import Terminal


@dataclass(frozen=True)
class Answer:
    """What a command found.

    Attributes:
        data: for scripts.
        show: prints it for readers.
        code: the exit status.
    """

    data: Mapping[str, Any]
    show: Callable[[Terminal], None]
    code: ExitCode = ExitCode.DONE


def answer(work: Callable[[Terminal], Answer], *, as_json: bool) -> None:
    """Do the work of a command and print its answer, or its error.

    Whatever models, factories and plugins print meanwhile goes to standard error, so that standard output has the
    answer alone.

    Args:
        work: does it.
        as_json: whether to print JSON, of errors too.

    Raises:
        typer.Exit: The status is not 0.
    """
    terminal = Terminal()
    try:
        with redirect_stdout(sys.stderr):
            found = work(terminal)
    except (Exception, KeyboardInterrupt) as error:
        raise typer.Exit(_tell(terminal, error, as_json)) from None
    if as_json:
        terminal.raw(as_text(found.data))
    else:
        found.show(terminal)
    if found.code:
        raise typer.Exit(found.code)


def as_text(data: Mapping[str, Any]) -> str:
    """Return data as JSON; numbers that JSON lacks are their text.

    >>> as_text({"sqnr_db": float("inf"), "shape": (2, 3)}).split()
    ['{', '"sqnr_db":', '"inf",', '"shape":', '[', '2,', '3', ']', '}']
    """
    return json.dumps(_plain(data), indent=2, allow_nan=False)


def _tell(terminal: Terminal, error: BaseException, as_json: bool) -> ExitCode:
    failure = explained(error)
    if failure is None:
        terminal.err.file.write("".join(traceback.format_exception(error)))
        failure = CommandError(
            f"unforeseen {type(error).__name__}: {error}", ExitCode.UNFORESEEN, kind=type(error).__name__
        )
    if as_json:
        told = {"exit_code": int(failure.code), "kind": failure.kind, "message": str(failure), **failure.details}
        terminal.raw(as_text({"error": told}))
    else:
        terminal.error(str(failure))
    return failure.code


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if value is None or isinstance(value, bool | int | float | str) else repr(value)
