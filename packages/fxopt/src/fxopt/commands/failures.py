"""Exit codes, and errors as the command reports them: with a kind for scripts, and without a traceback."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit codes of `fxopt`; docs/command.md says what each means."""

    DONE = 0
    UNEXPECTED = 1
    USAGE = 2
    FILE = 3
    CAPTURE = 4
    PASS = 5
    DEMAND = 6
    DIFFERS = 7
    UNDO = 8
    NOTHING_FOUND = 9
    REPORT = 10
    # As shells report a process that SIGINT ended: 128 + 2.
    INTERRUPTED = 130


class CommandError(Exception):
    """A command cannot do its work because of what it was given.

    Attributes:
        code: the exit code.
        kind: the name of a class of errors, by which scripts distinguish them.
    """

    def __init__(self, message: str, code: ExitCode, *, kind: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.kind = kind or type(self).__name__


class FileError(CommandError):
    """A file, folder or factory that was named cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.FILE)


@contextmanager
def blaming(code: ExitCode) -> Iterator[None]:
    """Give errors of fxopt in the ``with`` block this exit code, unless their class always has the same one."""
    from fxopt_core import FxoptError

    try:
        yield
    except FxoptError as error:
        raise CommandError(str(error), _code_of(error) or code, kind=type(error).__name__) from error


def explained(error: BaseException) -> CommandError | None:
    """Return an error as the command reports it, or None for an unexpected one."""
    if isinstance(error, CommandError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return CommandError("interrupted; no file was left half-written", ExitCode.INTERRUPTED, kind="Interrupted")
    if isinstance(error, OSError):
        return FileError(f"{type(error).__name__}: {error}")
    from fxopt_core import FxoptError

    if not isinstance(error, FxoptError):
        return None
    return CommandError(str(error), _code_of(error) or ExitCode.PASS, kind=type(error).__name__)


def _code_of(error: Exception) -> ExitCode | None:
    """Return the exit code of errors whose meaning does not depend on the command."""
    from fxopt_core import NotReversibleError, PipelineSyntaxError, RegistryError, VerificationError

    if isinstance(error, PipelineSyntaxError | RegistryError):
        return ExitCode.USAGE
    if isinstance(error, VerificationError):
        return ExitCode.DIFFERS
    return ExitCode.UNDO if isinstance(error, NotReversibleError) else None
