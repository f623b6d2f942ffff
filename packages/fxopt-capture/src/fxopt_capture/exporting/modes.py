"""Whether a model computes the same in training and evaluation mode, judged by the code of its classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from types import CodeType

from torch import nn
from torch.fx import GraphModule

from fxopt_capture.call.guards import InputGuards

_BASES: tuple[type, ...] = (nn.Module, GraphModule, object)


def captured_mode(model: nn.Module) -> bool | None:
    """Return the mode that a capture of `model` is made in, or None if the mode makes no difference.

    The mode makes a difference if the code of any of its modules' classes mentions ``training``; a module that reads
    the mode in any other way is not recognised.

    >>> captured_mode(nn.Sequential(nn.Linear(2, 2), nn.ReLU())) is None
    True
    >>> captured_mode(nn.Dropout().eval())
    False
    """
    # A captured module: its modules are plain ones, but its guards have the mode of the first capture.
    if any(isinstance(module, InputGuards) and module.mode is not None for module in model.modules()):
        return model.training
    classes = {base for module in model.modules() for base in type(module).__mro__ if base not in _BASES}
    return model.training if any("training" in code.co_names for cls in classes for code in _codes(cls)) else None


def training_note(model: nn.Module) -> str | None:
    """Return a note on a model in training mode, or None if it is not, or if the mode makes no difference.

    >>> training_note(nn.Dropout())
    'Dropout is in training mode, and its graph will be too: every call draws anew in dropout and takes statistics ...'
    >>> training_note(nn.Linear(2, 2)) is None
    True
    """
    if not captured_mode(model):
        return None
    return (
        f"{type(model).__name__} is in training mode, and its graph will be too: every call draws anew in dropout and "
        f"takes statistics of its batch in batch norms, which cannot be folded. For inference, call model.eval() "
        f"before the capture"
    )


def _codes(cls: type) -> Iterator[CodeType]:
    """Yield the code of a class's functions, properties and static methods, with the code nested in them."""
    for value in vars(cls).values():
        functions = (value.fget, value.fset) if isinstance(value, property) else (value,)
        for function in functions:
            # A decorator such as `torch.no_grad` hides the function whose code may mention `training`.
            unwrapped = inspect.unwrap(getattr(function, "__func__", function)) if callable(function) else None
            code = getattr(unwrapped, "__code__", None)
            if isinstance(code, CodeType):
                yield from _nested(code)


def _nested(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _nested(constant)
