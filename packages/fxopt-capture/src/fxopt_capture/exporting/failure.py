"""Errors of captures: the place in the model's source, and what to do."""

from __future__ import annotations

import os
import re
import sysconfig
import traceback
from collections.abc import Sequence
from types import FrameType

import torch
from torch import nn

from fxopt_core.errors import CaptureError

_STANDARD_LIBRARY = os.path.realpath(sysconfig.get_paths()["stdlib"])
_SITE_PACKAGES = tuple(os.path.realpath(sysconfig.get_paths()[key]) for key in ("purelib", "platlib"))
_TOOLS = tuple(os.path.realpath(os.path.dirname(path)) + os.sep for path in (torch.__file__, __file__))
_LIVE = 'torch.compile(model, backend="fxopt")'
_UNBACKED = re.compile(r"\bz?uf?\d+\b")
_DATA_DEPENDENT = ("GuardOnDataDependentSymNode", "UserError", "DataDependentOutputException")


def capture_error(model: nn.Module, error: Exception, hints: Sequence[str] = ()) -> CaptureError:
    """Describe a failed capture; the caller raises it from `error`.

    The message has the model's class, the error, the innermost line of the model's own source, and what to do. `hints`
    are sentences about unusual properties of the call.
    """
    remedy = ". ".join([*hints, _remedy(error)])
    return CaptureError(f"{type(model).__name__} cannot be captured: {described(error)}. {remedy}")


def described(error: BaseException) -> str:
    """Return the type of an exception, the first line of its text, and the place of the model's source."""
    place, text = source_of(error), first_line(error).rstrip(".")
    return type(error).__name__ + (f": {text}" if text else "") + (f" at {place}" if place else "")


def source_of(error: BaseException) -> str | None:
    """Return ``file:line, in function: code`` of the innermost frame of an exception outside torch and this package."""
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if _is_model_source(frame.filename):
            return f"{frame.filename}:{frame.lineno}, in {frame.name}: `{frame.line}`"
    return None


def line_of_frame(frame: FrameType | None) -> str | None:
    """Return ``file:line, in function`` of the innermost running frame outside torch and this package."""
    while frame is not None and not _is_model_source(frame.f_code.co_filename):
        frame = frame.f_back
    return None if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}, in {frame.f_code.co_name}"


def _is_model_source(filename: str) -> bool:
    path = os.path.realpath(filename)
    # Generated code has no file, and a name like `<eval_with_key>.0`.
    if filename.startswith("<") or path.startswith(_TOOLS):
        return False
    # The folder of installed packages lies within that of the standard library.
    return path.startswith(_SITE_PACKAGES) or not path.startswith(_STANDARD_LIBRARY + os.sep)


def first_line(error: BaseException) -> str:
    """Return the first line of an exception's text that is not empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


def _is_about_shapes(error: Exception) -> bool:
    return getattr(getattr(error, "error_type", None), "name", None) in ("CONSTRAINT_VIOLATION", "INVALID_INPUT")


def is_about_values(error: Exception) -> bool:
    """Return whether the model depends on the values of a tensor, and not only on sizes.

    If sizes may be 0 or 1, torch reports branches on sizes in the same way, but only values have symbols like ``u0``.
    """
    if _is_about_shapes(error) or not _is_data_dependent(error):
        return False
    return "Guard" not in type(error).__name__ or bool(_UNBACKED.search(str(error)))


def _is_data_dependent(error: Exception) -> bool:
    kinds = [kind.__name__ for kind in type(error).__mro__]
    return any(name in kinds for name in _DATA_DEPENDENT) or "data-dependent" in str(error).lower()


def _remedy(error: Exception) -> str:
    if _is_about_shapes(error):
        return (
            "Sizes that should be dynamic cannot vary freely in this model; leave them out of `dynamic_shapes`, or "
            "give torch.export.Dim.AUTO, which lets torch find out how they depend on each other. Where the model "
            f"itself fixes them, {_LIVE} takes other sizes"
        )
    if _is_data_dependent(error):
        return (
            "What the model does there depends on the values of a tensor, so that one graph cannot express it; write "
            "it with tensor operations (torch.where), capture the part of the model before or after it, or rewrite the "
            f"model as it runs: {_LIVE}"
        )
    return (
        "Check that the model itself takes these inputs, and give sizes of 2 or more where they should vary, since "
        f"torch may treat 1 as broadcast. If the model takes them, {_LIVE} rewrites it as it runs"
    )
