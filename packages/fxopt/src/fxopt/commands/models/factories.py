"""Models from a factory: ``package.module:factory``."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import traceback
from collections.abc import Callable, Mapping

from torch import nn

from fxopt.commands.checks import FACTORY
from fxopt.commands.failures import FileError
from fxopt_capture.exporting.modes import training_note
from fxopt_core import type_text
from fxopt_tools import Inputs

_RETURNS = "expected a model, or (model, args), or (model, args, kwargs)"
_FRAMES = 4
_NO_FRAMES = ("<frozen", os.path.dirname(__file__), os.path.dirname(importlib.__file__), pkgutil.__file__)


def from_factory(text: str) -> tuple[nn.Module, Inputs | None]:
    """Call a factory; its module may also be in the current folder.

    Args:
        text: ``package.module:factory``.

    Returns:
        The model, and the inputs that came with it.

    Raises:
        FileError: There is no such factory, it raises, or it returns something else, or a model in training mode
            that this mode changes.
    """
    factory = named_function(text)
    try:
        made = factory()
    except (Exception, SystemExit) as error:  # foreign code
        raise FileError(f"the factory {text} raised:\n{brief_traceback(error)}") from error
    model, *given = made if isinstance(made, tuple) and made else (made,)
    if not isinstance(model, nn.Module) or len(given) > 2:
        raise FileError(f"the factory {text} returned {type_text(made)}; {_RETURNS}")
    args, kwargs = given[0] if given else (), given[1] if len(given) > 1 else {}
    if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping):
        found = f"args as {type(args).__name__} and kwargs as {type(kwargs).__name__}"
        raise FileError(f"the factory {text} returned {found}; expected a tuple and a dictionary: (model, (x,))")
    if (note := training_note(model)) is not None:
        # Only the middle of the note, which says what the mode does; the remedy here is another one.
        what = note.partition(": ")[2].partition(". For inference")[0]
        raise FileError(f"the model of {text} is in training mode: {what}; return model.eval()")
    return model, Inputs(*args, **kwargs) if given else None


def named_function(text: str) -> Callable[..., object]:
    """Return a function by its name, ``package.module:function``; its module may also be in the current folder.

    Raises:
        FileError: There is none, or it is not a function.
    """
    if not FACTORY.fullmatch(text):
        raise FileError(f"{text!r} does not name a function; expected package.module:function")
    # The path of an installed script begins with the script's folder, not with the current one.
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found = pkgutil.resolve_name(text)
    except (Exception, SystemExit) as error:  # foreign code
        where = "as installed, or from the current folder"
        raise FileError(f"{text} cannot be imported, {where}:\n{brief_traceback(error)}") from error
    if not callable(found) or isinstance(found, nn.Module):
        raise FileError(f"{text} is {type_text(found)}, expected a function")
    function: Callable[..., object] = found
    return function


def brief_traceback(error: BaseException) -> str:
    """Return the innermost frames of an error outside of fxopt and Python's import system, and what it says.

    >>> try:
    ...     1 / 0
    ... except ZeroDivisionError as error:
    ...     print(brief_traceback(error).splitlines()[-1])
    ZeroDivisionError: division by zero
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(_NO_FRAMES)]
    lines = traceback.format_list(frames[-_FRAMES:]) + traceback.format_exception_only(error)
    return "".join(lines).rstrip()
