"""How every command runs: its work, then one answer, as text or as JSON, and an exit code."""

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

from fxopt.commands.failures import CommandError, ExitCode, explained
from fxopt.commands.terminal import Terminal


@dataclass(frozen=True)
class Answer:
    """The answer of a command.

    Attributes:
        data: the answer as data, for scripts.
        show: prints the answer for readers.
        code: the exit code.
    """

    data: Mapping[str, Any]
    show: Callable[[Terminal], None]
    code: ExitCode = ExitCode.DONE


def answer(work: Callable[[Terminal], Answer], *, as_json: bool) -> None:
    """Do the work of a command and print its answer, or its error.

    Whatever models, factories and plugins print meanwhile goes to standard error, so that standard output holds
    only the answer.

    Args:
        work: the work of the command.
        as_json: whether to print answers and errors as JSON.

    Raises:
        typer.Exit: The exit code is not 0.
    """
    # Made before the redirection, so that it holds the real standard output.
    terminal = Terminal()
    try:
        with redirect_stdout(sys.stderr):
            made = work(terminal)
    except (Exception, KeyboardInterrupt) as error:
        raise typer.Exit(_print_error(terminal, error, as_json)) from None
    if as_json:
        terminal.raw(as_text(made.data))
    else:
        made.show(terminal)
    if made.code:
        raise typer.Exit(made.code)


def as_text(data: Mapping[str, Any]) -> str:
    """Return data as JSON; infinities and NaN, which JSON lacks, become text.

    >>> as_text({"sqnr_db": float("inf"), "shape": (2, 3)}).split()
    ['{', '"sqnr_db":', '"inf",', '"shape":', '[', '2,', '3', ']', '}']
    """
    return json.dumps(_plain(data), indent=2, allow_nan=False)


def _print_error(terminal: Terminal, error: BaseException, as_json: bool) -> ExitCode:
    failure = explained(error)
    if failure is None:
        terminal.err.file.write("".join(traceback.format_exception(error)))
        message = f"unexpected {type(error).__name__}: {error}"
        failure = CommandError(message, ExitCode.UNEXPECTED, kind=type(error).__name__)
    if as_json:
        data = {"exit_code": int(failure.code), "kind": failure.kind, "message": str(failure)}
        terminal.raw(as_text({"error": data}))
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
