"""The names of inputs that a model's ``forward`` takes, and messages about unknown names."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from torch import nn

from fxopt_capture.call.arguments import CallForm, forward_signature
from fxopt_core.errors import CaptureError

_MISSPELT = 0.8  # of 1: "atention_mask" is 0.96 of "attention_mask", and "pixel_mask" 0.73 of "pixel_values"


def check_names(model: nn.Module, names: Sequence[str]) -> None:
    """Refuse names that the model's ``forward`` does not take."""
    taken = _taken(model)
    for name in names:
        if name not in taken:
            raise CaptureError(_unknown(model, name))


def extra_names(model: nn.Module, form: CallForm) -> list[str]:
    """Return the inputs that only a ``**kwargs`` of the model's ``forward`` takes."""
    taken = {*_taken(model), *form.variadic}
    return [name for name in form.inputs if name not in taken]


def unknown_names(model: nn.Module, form: CallForm) -> list[str]:
    """Return a sentence about each extra input whose name is close to one that ``forward`` takes."""
    return [_unknown(model, name) for name in extra_names(model, form) if _close(name, _taken(model))]


def ignored_names(model: nn.Module, form: CallForm, unused: Sequence[str]) -> list[str]:
    """Return the inputs that only a ``**kwargs`` of ``forward`` takes, and that nothing reads.

    Raises:
        CaptureError: The name of one is so close to an input of ``forward`` that it must be misspelt.
    """
    ignored = [name for name in extra_names(model, form) if name in unused]
    for name in ignored:
        if _close(name, _taken(model), _MISSPELT):
            raise CaptureError(_unknown(model, name))
    return ignored


def _taken(model: nn.Module) -> list[str]:
    parameters = forward_signature(model).parameters
    return [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]


def _close(name: str, taken: Sequence[str], cutoff: float = 0.6) -> list[str]:
    return difflib.get_close_matches(name, taken, n=3, cutoff=cutoff)


def _unknown(model: nn.Module, name: str) -> str:
    taken = _taken(model)
    close = _close(name, taken)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
    return f"{type(model).__name__}.forward takes no input {name!r}{hint} It takes: {', '.join(taken)}"
