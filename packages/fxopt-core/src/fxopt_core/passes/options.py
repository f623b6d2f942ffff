"""The options of a pass are the parameters of its constructor.

They are read from the signature: `options_of` says what a pass takes, `bind` what one object was given, and
`checked_options` matches names and values that came from outside (a command line, pipeline text) against it.
"""

from __future__ import annotations

import dataclasses
import inspect
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from inspect import Parameter
from types import MappingProxyType
from typing import Any

from torch import nn

from fxopt_core.errors import PassOptionError
from fxopt_core.naming import close_names, option_text
from fxopt_core.values.coercion import coerce

_VARIADIC = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)
# What stands in a dataclass's constructor where the default is made anew each time.
_FACTORY = dataclasses._HAS_DEFAULT_FACTORY  # type: ignore[attr-defined]  # private, and nothing else tells it
_signatures: weakref.WeakKeyDictionary[Callable[..., object], inspect.Signature] = weakref.WeakKeyDictionary()


@dataclass(frozen=True)
class OptionInfo:
    """One option of a pass.

    Attributes:
        name: the constructor's parameter, in snake_case.
        annotation: its type, resolved where that is possible; ``inspect.Parameter.empty`` where there is none.
        default: its default; ``inspect.Parameter.empty`` where there is none.
        required: whether it has no default.
    """

    name: str
    annotation: object
    default: object
    required: bool

    def checked(self, value: object, *, pass_name: str = "") -> object:
        """Return a value of this option as the annotation wants it.

        The default passes as it is, whatever the annotation says (``where: str = None`` is common).

        Raises:
            PassOptionError: the value does not fit the annotation.
        """
        if value is self.default:
            return value
        return coerce(value, self.annotation, pass_name=pass_name, option=option_text(self.name))


def options_of(cls: type) -> Mapping[str, OptionInfo]:
    """Return the options of a pass by name, in the order of its constructor's parameters.

    ``*args`` and ``**kwargs`` are no options: they have no name by which text could set them.

    >>> class Pad:
    ...     def __init__(self, *, multiple_of: int = 8) -> None: ...
    >>> options_of(Pad)["multiple_of"]
    OptionInfo(name='multiple_of', annotation=<class 'int'>, default=8, required=False)
    """
    parameters = {name: each for name, each in _signature(cls).parameters.items() if each.kind not in _VARIADIC}
    return MappingProxyType(
        {
            name: OptionInfo(name, each.annotation, _default(cls, each), each.default is Parameter.empty)
            for name, each in parameters.items()
        }
    )


def _default(cls: type, parameter: Parameter) -> object:
    made = parameter.default is _FACTORY
    return cls.__dataclass_fields__[parameter.name].default_factory() if made else parameter.default  # type: ignore[attr-defined]  # a dataclass


def bind(cls: type, args: tuple[object, ...], kwargs: Mapping[str, object]) -> dict[str, object]:
    """Return the arguments of one constructor call by parameter name, with the defaults filled in.

    A ``*names`` parameter counts as one option, a tuple; the entries of a ``**kwargs`` parameter count one by one.
    A call that lacks required arguments, as ``copy`` and ``pickle`` make it, gives what is known.

    >>> class Pad:
    ...     def __init__(self, value: float = 0.0, *, multiple_of: int = 8) -> None: ...
    >>> bind(Pad, (1.5,), {})
    {'value': 1.5, 'multiple_of': 8}
    """
    signature = _signature(cls)
    try:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            bound = signature.bind_partial(*args, **kwargs)
    except TypeError as error:
        names = ", ".join(signature.parameters) or "none"
        modules = [value for value in args if isinstance(value, nn.Module)]
        remedy = f"; to run it, write {cls.__qualname__}()(graph_module)" if modules else ""
        raise PassOptionError(f"{cls.__qualname__}() {error}; its options: {names}{remedy}") from None
    bound.apply_defaults()
    values = dict[str, object]()
    for name, value in bound.arguments.items():
        parameter = signature.parameters[name]
        entries = value if parameter.kind is Parameter.VAR_KEYWORD else {name: value}
        values |= {name: _default(cls, parameter)} if value is _FACTORY else entries
    return {name: kept(value) for name, value in values.items()}


def construct(cls: type, options: Mapping[str, object]) -> object:
    """Return an object made with these options, given by parameter name.

    >>> class Pad:
    ...     def __init__(self, value: float = 0.0, /, *, multiple_of: int = 8) -> None:
    ...         self.given = (value, multiple_of)
    >>> construct(Pad, {"value": 2.0}).given
    (2.0, 8)
    """
    signature = _signature(cls)
    bound = signature.bind_partial()
    bound.arguments.update(options)
    bound.apply_defaults()
    return cls(*bound.args, **bound.kwargs)


def kept(value: object) -> object:
    """Return a value as it is now: lists, tuples, dictionaries and sets are copied, what is in them likewise.

    >>> given = [1, {"a": [2]}]
    >>> now = kept(given)
    >>> given[1]["a"].append(3)
    >>> now
    [1, {'a': [2]}]
    """
    try:
        return _kept(value)
    except RecursionError:  # such a value has no signature either
        return value


def _kept(value: Any) -> object:
    if type(value) is dict:
        return {key: _kept(item) for key, item in value.items()}
    if type(value) is set:
        return set(value)
    return type(value)(map(_kept, value)) if type(value) in (list, tuple) else value


def find_option(pass_name: str, options: Mapping[str, OptionInfo], name: str) -> OptionInfo:
    """Return the option of this name, given in snake_case or kebab-case."""
    known = {option_text(parameter): info for parameter, info in options.items()}
    found = known.get(option_text(name))
    if found is None:
        has = f"it has {', '.join(known)}" if known else "it has none"
        hint = close_names(name, known)
        raise PassOptionError(f"pass {pass_name!r} has no option {name!r}; {has}{hint}")
    return found


def checked_options(
    pass_name: str, options: Mapping[str, OptionInfo], given: Mapping[str, object]
) -> dict[str, object]:
    """Return given values by parameter name, checked and coerced."""
    checked: dict[str, object] = {}
    for name, value in given.items():
        info = find_option(pass_name, options, name)
        if info.name in checked:
            raise PassOptionError(f"pass {pass_name!r} is given option {option_text(info.name)!r} twice; give it once")
        checked[info.name] = info.checked(value, pass_name=pass_name)
    missing = [option_text(info.name) for info in options.values() if info.required and info.name not in checked]
    if missing:
        raise PassOptionError(f"pass {pass_name!r} needs a value for {', '.join(missing)}")
    return checked


def _signature(cls: type) -> inspect.Signature:
    """Return the constructor's signature without ``self``; kept per function, since every construction needs it."""
    constructor: Callable[..., object] = cls.__init__  # type: ignore[misc]  # meant: the one that this very class runs
    if constructor is object.__init__:
        return inspect.Signature()
    found = _signatures.get(constructor)
    if found is None:
        names = getattr(inspect.unwrap(constructor), "__globals__", {})
        parameters = list(inspect.signature(constructor).parameters.values())[1:]
        resolved = [each.replace(annotation=_resolved(each.annotation, names)) for each in parameters]
        found = _signatures[constructor] = inspect.Signature(resolved)
    return found


def _resolved(annotation: object, names: dict[str, Any]) -> object:
    """Return what an annotation that is text stands for; the text where only a type checker knows its names."""
    if isinstance(annotation, str):
        with suppress(Exception):
            return eval(annotation, names)
    return annotation
