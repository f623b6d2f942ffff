"""Errors as the command tells them: an exit status, a kind for scripts, and a message without a traceback."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from fxopt.commands.exit_codes import ExitCode


class CommandError(Exception):
    """What a command cannot do, for a reason that lies with what it was given.

    Attributes:
        code: the exit status.
        kind: what scripts tell errors apart by: the name of a class of errors.
        details: what else scripts are told.
    """

    def __init__(
        self, message: str, code: ExitCode, *, kind: str | None = None, details: Mapping[str, object] | None = None
    ) -> None:
        super().__init__(message)
        self.code = code
        self.details = details or {}
        self.kind = kind or type(self).__name__


class FileError(CommandError):
    """A file, folder or factory that was named cannot be used."""

    def __init__(self, message: str) -> None:
        super().__init__(message, ExitCode.FILE)


class Interrupted(CommandError):
    """Ctrl-C, or a request to terminate."""

    def __init__(self, code: ExitCode) -> None:
        super().__init__("interrupted; no file was left half-written", code)


class Terminated(KeyboardInterrupt):
    """A request to terminate, which cleans up on its way out as Ctrl-C does."""


@contextmanager
def blaming(code: ExitCode) -> Iterator[None]:
    """Let errors of fxopt within the ``with`` block have this exit status, where they have none of their own."""
    from fxopt_core import FxoptError

    try:
        yield
    except FxoptError as error:
        known = _code_of(error)
        raise CommandError(str(error), code if known is None else known, kind=type(error).__name__) from error


def explained(error: BaseException) -> CommandError | None:
    """Return an error as the command tells it, or None for one that nobody foresaw."""
    if isinstance(error, CommandError):
        return error
    if isinstance(error, KeyboardInterrupt):
        return Interrupted(ExitCode.TERMINATED if isinstance(error, Terminated) else ExitCode.INTERRUPTED)
    if isinstance(error, OSError):
        return FileError(f"{type(error).__name__}: {error}")
    from fxopt_core import FxoptError

    if not isinstance(error, FxoptError):
        return None
    return CommandError(str(error), _code_of(error) or ExitCode.PASS, kind=type(error).__name__)


def _code_of(error: Exception) -> ExitCode | None:
    """Return the status of errors that mean the same wherever they come from."""
    from fxopt_core import NotReversibleError, PipelineSyntaxError, RegistryError, VerificationError

    if isinstance(error, PipelineSyntaxError | RegistryError):
        return ExitCode.USAGE
    if isinstance(error, VerificationError):
        return ExitCode.DIFFERS
    return ExitCode.UNDO if isinstance(error, NotReversibleError) else None
