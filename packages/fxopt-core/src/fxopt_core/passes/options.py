"""The options of a pass are the parameters of its constructor.

`options_of` reads them from the signature; `bind` returns those that one object was given. Options given as text or by
name are plain values: numbers, text, True, False, None, and lists and tuples of these. They are checked against the
annotation of the parameter, and converted where text cannot express the exact type: ``["a"]`` given for a
``tuple[str, ...]`` becomes ``("a",)``, and ``1`` given for a ``float`` becomes ``1.0``. Nothing else is converted: a
``bool`` is not an ``int``, and a ``str`` is not a sequence of strings. ``Any`` is not checked.
"""

from __future__ import annotations

import collections.abc as abc
import inspect
import reprlib
import types
from collections.abc import Callable, Mapping
from inspect import Parameter
from types import MappingProxyType
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin

import torch
from torch import nn
from torch.utils._pytree import tree_map

from fxopt_core.errors import PassOptionError
from fxopt_core.naming import option_text

_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
_PLAIN = (type(None), bool, int, float, str)
PLAIN_VALUES = "a number, text, True, False, None, or a list or tuple of such"
# Sequence types of annotations, each with the type that a list or tuple is converted to; None: it keeps its own.
_SEQUENCES: dict[Any, Any] = {list: list, tuple: tuple, abc.Sequence: None, abc.Collection: None, abc.Iterable: None}
# Returned by `_fit` for a value that does not fit, since None may be a value.
_MISFIT = object()


class OptionInfo(NamedTuple):
    """One option of a pass.

    Attributes:
        name: the constructor's parameter, in snake_case.
        annotation: its type; ``inspect.Parameter.empty`` where there is none.
        default: its default; ``inspect.Parameter.empty`` where there is none.
    """

    name: str
    annotation: object
    default: object

    def checked(self, value: object, *, pass_name: str) -> object:
        """Return a value of this option, converted to the annotation.

        The default is accepted as it is, whatever the annotation says (``where: str = None`` is common).

        Raises:
            PassOptionError: the value does not fit the annotation, or is not plain.

        >>> OptionInfo("min_group", int, 2).checked(True, pass_name="merge-linears")
        Traceback (most recent call last):
        fxopt_core.errors.PassOptionError: pass 'merge-linears', option 'min-group': found True (bool), expected int
        """
        if value is self.default:
            return value
        plain = is_plain(value)
        fitted = _fit(value, self.annotation) if plain else _MISFIT
        if fitted is _MISFIT:
            found = f"pass {pass_name!r}, option {option_text(self.name)!r}: found {reprlib.repr(value)}"
            expected = show_annotation(self.annotation) if plain else PLAIN_VALUES
            raise PassOptionError(f"{found} ({type(value).__qualname__}), expected {expected}")
        return fitted


def options_of(cls: type) -> Mapping[str, OptionInfo]:
    """Return the options of a pass by name, in the order of its constructor's parameters.

    ``*args`` and ``**kwargs`` are not options: they have no name by which text could set them.

    Raises:
        NameError: an annotation names what only a type checker knows; import it at run time.

    >>> class Pad:
    ...     def __init__(self, *, multiple_of: int = 8) -> None: ...
    >>> options_of(Pad)["multiple_of"]
    OptionInfo(name='multiple_of', annotation=<class 'int'>, default=8)
    """
    named = [each for each in _signature(cls, eval_str=True).parameters.values() if each.kind not in _VARIADIC]
    return MappingProxyType({each.name: OptionInfo(each.name, each.annotation, each.default) for each in named})


def bind(cls: type, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of one constructor call by parameter name, with the defaults filled in.

    A ``*names`` parameter counts as one option, a tuple, and a ``**kwargs`` parameter as one, a dictionary. Missing
    arguments are not an error, because ``copy`` and ``pickle`` call the class without any.

    >>> class Pad:
    ...     def __init__(self, value: float = 0.0, *, multiple_of: int = 8) -> None: ...
    >>> bind(Pad, (1.5,), {})
    {'value': 1.5, 'multiple_of': 8}
    """
    signature = _signature(cls)
    try:
        bound = signature.bind_partial(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(signature.parameters) or "none"
        is_run = any(isinstance(value, nn.Module) for value in args)
        remedy = f"; to run it, write {cls.__qualname__}()(graph_module)" if is_run else ""
        raise PassOptionError(f"{cls.__qualname__}() {error}; its options: {names}{remedy}") from None
    bound.apply_defaults()
    # Later changes to the caller's lists, tuples, dictionaries and sets must not reach the options.
    return tree_map(  # type: ignore[no-any-return]  # as given
        lambda leaf: set(leaf) if type(leaf) is set else leaf,
        bound.arguments,
        is_leaf=lambda each: type(each) is torch.Size,  # of which torch makes a tuple
    )


def is_plain(value: object) -> bool:
    """Return whether text can express a value: a number, text, a boolean, None, or a list or tuple of these.

    >>> is_plain([1, ("a", None)]), is_plain({1})
    (True, False)
    """
    return all(map(is_plain, value)) if type(value) in (list, tuple) else type(value) in _PLAIN  # type: ignore[call-overload]  # a list or tuple


def show_annotation(annotation: object) -> str:
    """Return an annotation as a reader would write it.

    >>> show_annotation(tuple[str, ...]), show_annotation(int), show_annotation(int | None)
    ('tuple[str, ...]', 'int', 'int | None')
    """
    if isinstance(annotation, type) and get_origin(annotation) is None:
        return annotation.__qualname__
    return str(annotation).replace("typing.", "").replace("collections.abc.", "")


def _signature(cls: type, *, eval_str: bool = False) -> inspect.Signature:
    """Return the constructor's signature without ``self``; with ``eval_str``, annotations are not left as text."""
    constructor: Callable[..., object] = cls.__init__  # type: ignore[misc]  # meant: the one that this very class runs
    if constructor is object.__init__:
        return inspect.Signature()
    return inspect.Signature([*inspect.signature(constructor, eval_str=eval_str).parameters.values()][1:])


def _fit(value: Any, annotation: Any) -> object:
    """Return the value converted to the annotation, or `_MISFIT`."""
    wanted, arguments = get_origin(annotation) or annotation, get_args(annotation)
    if wanted in (Union, types.UnionType):
        fitted = [each for each in (_fit(value, member) for member in arguments) if each is not _MISFIT]
        # The member of the value's own type wins: 1 for `float | int` stays an int.
        return next((each for each in fitted if type(each) is type(value)), fitted[0] if fitted else _MISFIT)
    if wanted in _SEQUENCES:
        is_fixed = wanted is tuple and arguments and arguments[-1] is not Ellipsis
        if type(value) not in (list, tuple) or (is_fixed and len(arguments) != len(value)):
            return _MISFIT
        fitted = list(map(_fit, value, arguments if is_fixed else (arguments[:1] or (Any,)) * len(value)))
        made: Any = _SEQUENCES[wanted] or type(value)
        return _MISFIT if any(each is _MISFIT for each in fitted) else made(fitted)
    if wanted is float and type(value) is int:
        # Beyond this, some integers have no equal float.
        return float(value) if abs(value) <= 2**53 else _MISFIT
    if wanted is Literal:
        fits = any(type(value) is type(choice) and value == choice for choice in arguments)
    elif wanted is None or wanted in _PLAIN:
        fits = type(value) is (wanted or type(None))
    else:
        # `Any` is a class since Python 3.11. Values given as text are instances of no classes but those above.
        fits = not isinstance(wanted, type) or wanted in (object, Any, Parameter.empty)
    return value if fits else _MISFIT
