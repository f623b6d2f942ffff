"""The names of inputs that a model's ``forward`` takes, and what to say about others."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from torch import nn

from fxopt_capture.call.arguments import CallForm, forward_signature
from fxopt_core.errors import CaptureError


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
    """Return a sentence about each of these inputs whose name is close to one that ``forward`` does take."""
    return [_unknown(model, name) for name in extra_names(model, form) if _close(name, _taken(model))]


def check_unused(model: nn.Module, form: CallForm, unused: Sequence[str]) -> None:
    """Refuse inputs that only a ``**kwargs`` of ``forward`` takes, and that nothing reads."""
    for name in extra_names(model, form):
        if name in unused:
            raise CaptureError(_unknown(model, name))


def _taken(model: nn.Module) -> list[str]:
    parameters = forward_signature(model).parameters
    return [name for name, parameter in parameters.items() if parameter.kind is not parameter.VAR_KEYWORD]


def _close(name: str, taken: Sequence[str]) -> list[str]:
    return difflib.get_close_matches(name, taken, n=3)


def _unknown(model: nn.Module, name: str) -> str:
    taken = _taken(model)
    close = _close(name, taken)
    hint = f"; did you mean {' or '.join(map(repr, close))}?" if close else "."
    return f"{type(model).__name__}.forward takes no input {name!r}{hint} It takes: {', '.join(taken)}"
