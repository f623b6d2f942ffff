"""Models from a factory: ``package.module:factory``."""

from __future__ import annotations

import importlib
import os
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from fxopt.commands.checks import FACTORY, find_in_current_folder, no_module
from fxopt.commands.failures import FileError
from fxopt_capture.exporting.modes import training_note
from fxopt_core import (
    close_names,
    type_text,
)
from fxopt_tools import Inputs

_RETURNS = "expected a model, or (model, args), or (model, args, kwargs)"
_FRAMES = 4


def from_factory(text: str) -> tuple[nn.Module, Inputs | None]:
    """Call a factory; its module may also be in the current folder.

    Args:
        text: ``package.module:factory``.

    Returns:
        The model, and the inputs that came with it.

    Raises:
        FileError: There is no such factory, it raises, or it returns something else, or a model that training mode
            changes in that mode.
    """
    factory = _named(text)
    if not callable(factory) or isinstance(factory, nn.Module):
        raise FileError(f"{text} is {type_text(factory)}, expected a function without arguments; {_RETURNS}")
    model, inputs = _checked(_called(factory, text), text)
    if (note := training_note(model)) is not None:
        what = note.partition(": ")[2].partition(". For inference")[0]
        raise FileError(f"the model of {text} is in training mode: {what}; return model.eval()")
    return model, inputs


def named_function(text: str) -> Callable[..., object]:
    """Return a function by its name, ``package.module:function``.

    Raises:
        FileError: There is none, or it is not a function.
    """
    if not FACTORY.fullmatch(text):
        raise FileError(f"{text!r} does not name a function; expected package.module:function")
    found = _named(text)
    if not callable(found):
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
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<frozen", os.path.dirname(__file__), os.path.dirname(importlib.__file__)))
    ]
    lines = traceback.format_list(frames[-_FRAMES:]) + traceback.format_exception_only(error)
    return "".join(lines).rstrip()


def _named(text: str) -> Any:
    module_name, _, attribute = text.partition(":")
    find_in_current_folder()
    found = _imported(module_name, text)
    for name in attribute.split("."):
        found = _attribute(found, name, text)
    return found


def _imported(name: str, text: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise FileError(f"{text} cannot be imported:\n{brief_traceback(error)}") from error
        raise no_module(error.name, text) from error
    except (Exception, SystemExit) as error:  # foreign code
        raise FileError(f"{text} cannot be imported:\n{brief_traceback(error)}") from error


def _attribute(owner: Any, name: str, text: str) -> Any:
    try:
        return getattr(owner, name)
    except AttributeError as error:
        known = [known for known in vars(owner) if not known.startswith("_")]
        message = f"{getattr(owner, '__name__', owner)} has no {name!r}, which {text} names{close_names(name, known)}"
        raise FileError(message) from error


def _called(factory: Callable[[], object], text: str) -> object:
    try:
        return factory()
    except (Exception, SystemExit) as error:  # foreign code
        raise FileError(f"the factory {text} raised:\n{brief_traceback(error)}") from error


def _checked(made: object, text: str) -> tuple[nn.Module, Inputs | None]:
    if isinstance(made, nn.Module):
        return made, None
    parts = made if isinstance(made, tuple) else ()
    if not (len(parts) in (2, 3) and isinstance(parts[0], nn.Module)):
        raise FileError(f"the factory {text} returned {_described(made)}; {_RETURNS}")
    args, kwargs = parts[1], parts[2] if len(parts) == 3 else {}
    if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping):
        found = f"args as {type(args).__name__} and kwargs as {type(kwargs).__name__}"
        raise FileError(f"the factory {text} returned {found}; expected a tuple and a dictionary: (model, (x,))")
    return parts[0], Inputs(*args, **kwargs)


def _described(made: object) -> str:
    if isinstance(made, tuple):
        return f"a tuple of {', '.join(type(part).__name__ for part in made) or 'nothing'}"
    return type_text(made)
