"""Every error that fxopt raises: all derive from `FxoptError`.

A message names the node or module, what was found, what was expected, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable


class FxoptError(Exception):
    """Base class of all errors of fxopt."""


def halted_by(error: BaseException, handled: BaseException | None = None) -> KeyboardInterrupt | None:
    """Return the interrupt in an error's chain, or None; the chain ends at ``handled``, which the caller was handling.

    Torch wraps exceptions of traced code in errors of its own.
    """
    cause: BaseException | None = error
    # An interrupt that the caller was handling belongs to the caller. A chain may also lead back into itself.
    seen = {id(handled)}
    while cause is not None and id(cause) not in seen:
        if isinstance(cause, KeyboardInterrupt):
            return cause
        seen.add(id(cause))
        cause = cause.__cause__ or cause.__context__
    return None


class PassError(FxoptError):
    """A pass failed; the graph module is as it was before the run.

    Attributes:
        pass_name: kebab-case name of the pass, or None if no pass is involved.
        index: position of the pass in its composition, counted from 0, or None outside one.
    """

    def __init__(self, message: str, *, pass_name: str | None = None, index: int | None = None) -> None:
        super().__init__(message)
        self.pass_name, self.index = pass_name, index


class PreconditionError(PassError):
    """The input of a run, or a demand on the run, is not valid."""


class PostconditionError(PassError):
    """The result of a run is not what was required."""


class NotReversibleError(PassError):
    """A pass that cannot be reversed was asked to reverse."""


class UndoError(NotReversibleError, PreconditionError):
    """A reversible pass cannot be undone on this graph any more; nothing was changed."""


class VetoError(PassError):
    """An instrument vetoed a pass that the request depends on."""


class CheckpointError(FxoptError, RuntimeError):
    """A checkpoint does not fit, or original keys and values cannot be restored; nothing was loaded.

    It is also a `RuntimeError`, as ``load_state_dict`` raises, so code that loads either way catches one error.

    Attributes:
        missing_keys: the original keys that the checkpoint lacks.
        unexpected_keys: keys of the checkpoint that the original model lacks.
    """

    def __init__(self, message: str, *, missing_keys: Iterable[str] = (), unexpected_keys: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.missing_keys, self.unexpected_keys = list(missing_keys), list(unexpected_keys)


class VerificationError(PassError):
    """A transformed module does not compute what the original does."""


class RegistryError(FxoptError):
    """Base class of the errors of the registry."""


class UnknownPassError(RegistryError):
    """No pass or pipeline has this name."""


class DuplicatePassError(RegistryError):
    """Two plugins claim one name."""


class PluginLoadError(RegistryError):
    """A plugin could not be loaded; its cause is chained."""


class PassOptionError(RegistryError, TypeError, ValueError):
    """A pass has no such option, or the option does not accept the value."""


class PipelineSyntaxError(FxoptError):
    """A pipeline's text cannot be read.

    Attributes:
        text: the whole text.
        column: where reading stopped, counted from 0.
    """

    def __init__(self, message: str, *, text: str, column: int) -> None:
        super().__init__(f"{message} (column {column})\n  {text}\n  {' ' * column}^")
        self.text, self.column = text, column


class PipelineOptionError(PipelineSyntaxError, PassOptionError):
    """A pipeline's text gives a pass an unknown option, or a value that the option does not accept."""


class CaptureError(FxoptError):
    """A model cannot be captured as a graph."""
