"""Every error that fxopt raises: all derive from `FxoptError`.

A message names the node or module, what was found, what was expected, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable


class FxoptError(Exception):
    """Base class of all errors of fxopt."""


def halted_by(error: BaseException, handled: BaseException | None = None) -> KeyboardInterrupt | None:
    """Return the interrupt that led to an error, if one did; what the caller was handling before did not.

    Torch puts what is raised in the code that it traces into errors of its own, which chain it.
    """
    cause: BaseException | None = error
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
        pass_name: kebab-case name of the pass, or None where no pass is involved.
        index: position of the pass in its composition, counted from 0, or None outside one.
    """

    def __init__(self, message: str, *, pass_name: str | None = None, index: int | None = None) -> None:
        super().__init__(message)
        self.pass_name = pass_name
        self.index = index


class PreconditionError(PassError):
    """The input of a run, or a demand checked before it, does not hold."""


class PostconditionError(PassError):
    """A run did not produce what was demanded of it."""


class NotReversibleError(PassError):
    """A pass that cannot be reversed was asked to reverse."""


class UndoError(NotReversibleError, PreconditionError):
    """A reversible pass cannot be undone on this graph any more; nothing was changed."""


class VetoError(PassError):
    """An instrument vetoed a pass, without which the request cannot be met."""


class CheckpointError(FxoptError, RuntimeError):
    """A checkpoint does not fit, or original keys and values cannot be restored; nothing was loaded.

    It is a `RuntimeError`, too, as what ``load_state_dict`` raises: code that loads either way catches one error.

    Attributes:
        missing_keys: the original keys that the checkpoint lacks.
        unexpected_keys: its keys that the original model does not have.
    """

    def __init__(self, message: str, *, missing_keys: Iterable[str] = (), unexpected_keys: Iterable[str] = ()) -> None:
        super().__init__(message)
        self.missing_keys = list(missing_keys)
        self.unexpected_keys = list(unexpected_keys)


class VerificationError(PassError):
    """The numbers that a transformed module computes are not those of the original."""


class RegistryError(FxoptError):
    """Base class of the errors of the registry."""


class UnknownPassError(RegistryError):
    """No pass or pipeline has this name."""


class DuplicatePassError(RegistryError):
    """Two plugins claim one name."""


class PluginLoadError(RegistryError):
    """A plugin could not be loaded; its cause is chained."""


class PassOptionError(RegistryError, TypeError, ValueError):
    """A pass has no such option, or the option does not take such a value."""


class PipelineSyntaxError(FxoptError):
    """A pipeline's text cannot be read.

    Attributes:
        text: the whole text.
        column: where reading stopped, counted from 0.
    """

    def __init__(self, message: str, *, text: str, column: int) -> None:
        super().__init__(f"{message} (column {column})\n  {text}\n  {' ' * column}^")
        self.text = text
        self.column = column


class PipelineOptionError(PipelineSyntaxError, PassOptionError):
    """A pipeline's text gives a pass an option that it does not have, or a value that it does not take."""


class CaptureError(FxoptError):
    """A model cannot be captured as a graph."""
