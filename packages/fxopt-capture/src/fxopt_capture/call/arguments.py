"""The arguments of a model's call, by name: which become inputs of the graph, and which are baked into it.

A captured graph takes its inputs by the names of the model's ``forward``. Tensors, and containers that hold tensors,
become inputs. Everything else (flags, numbers, strings) is fixed when the model is captured, and a later call may only
repeat it.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxopt_capture.call.caches import is_cache
from fxopt_capture.call.nesting import Nesting, check_nesting
from fxopt_capture.call.structures import free_name, register_again
from fxopt_core.errors import CaptureError

_EMPTY = inspect.Parameter.empty
_TENSOR = {torch.Tensor}
#: The input whose size absent inputs of a text model get.
IDS = "input_ids"


@dataclass(frozen=True)
class Parameter:
    """One named argument of ``forward``, which a call may give by position, by keyword or both.

    The first of a ``*args`` has the name ``args_0``.
    """

    name: str
    positional: bool
    keyword: bool
    required: bool
    default: object = None


@dataclass(frozen=True)
class CallForm:
    """How the model was called when it was captured.

    Attributes:
        parameters: arguments of ``forward`` that a call by position or name can give, in order.
        inputs: names of those that are inputs of the graph, in order.
        fixed: name -> value, baked into the graph.
        implied: names among `fixed` that the capture chose itself; a call need not repeat them.
        variadic: names among `inputs` that fill the model's ``*args``, in order.
        by_position: how many of `parameters` were given by position.
        absent: names among `inputs` that a call may leave out -> the number that fills them, in the shape of `IDS`.
        ignored: names that a ``**kwargs`` of ``forward`` takes, and that the model does not read; calls may give them.
    """

    parameters: tuple[Parameter, ...]
    inputs: tuple[str, ...]
    fixed: Mapping[str, object] = field(default_factory=dict)
    implied: frozenset[str] = frozenset()
    variadic: tuple[str, ...] = ()
    by_position: int = 0
    absent: Mapping[str, int] = field(default_factory=dict)
    ignored: frozenset[str] = frozenset()

    def with_implied(self, **values: object) -> CallForm:
        """Return this form with values baked in that the caller has not given."""
        return replace(self, fixed={**self.fixed, **values}, implied=self.implied | values.keys())

    def ignoring(self, names: Collection[str]) -> CallForm:
        """Return this form without some of its inputs, which calls may still give."""
        inputs = tuple(name for name in self.inputs if name not in names)
        return replace(self, inputs=inputs, ignored=self.ignored | frozenset(names))

    def without(self, name: str) -> CallForm:
        """Return this form without one of the values that are baked in."""
        fixed = {key: value for key, value in self.fixed.items() if key != name}
        return replace(self, fixed=fixed, implied=self.implied - {name})

    def arguments(self, inputs: Mapping[str, object]) -> tuple[list[object], dict[str, object]]:
        """Return the positional and keyword arguments with which the model itself is called.

        `inputs` are the graph's inputs by name. Arguments are passed by name, except positional-only ones and those
        that the capture was given by position: hooks of the model see the difference.
        """
        # Containers are new ones for each call: a model may take what they hold out of them.
        values = {**inputs, **pytree.tree_map(lambda leaf: leaf, dict(self.fixed))}
        positional: list[object] = []
        for index, parameter in enumerate(self.parameters):
            # What stands before `*args` goes by position as soon as `*args` are given.
            by_position = not parameter.keyword or bool(self.variadic) or index < self.by_position
            if not parameter.positional or not by_position:
                continue
            if parameter.name in values:
                positional.append(values.pop(parameter.name))
            elif not parameter.required:
                # Otherwise the arguments that follow would take its place.
                positional.append(parameter.default)
        return positional, values


def forward_signature(model: nn.Module) -> inspect.Signature:
    """Return the signature of the model's ``forward``, without ``self``."""
    return inspect.signature(model.forward)


def bind_call(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]
) -> tuple[CallForm, dict[str, object]]:
    """Return the form of a call of a model, and the graph's inputs by name."""
    signature = forward_signature(model)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        given = [f"{len(args)} by position", *map(repr, kwargs)]
        raise CaptureError(
            f"`{type(model).__name__}.forward{signature}` does not take the arguments given "
            f"({', '.join(given)}): {error}"
        ) from error
    values, parameters, variadic = _named(signature, bound)
    inputs: dict[str, object] = {}
    fixed: dict[str, object] = {}
    defaults = {parameter.name: parameter for parameter in parameters if not parameter.required}
    for name, value in values.items():
        if _holds_tensor(value) or is_cache(value) or name in variadic:
            inputs[name] = value
        # None for an argument whose default is None is the same as leaving it out, and is not baked in.
        elif value is not None or name not in defaults or defaults[name].default is not None:
            fixed[name] = value
    if not any(_holds_tensor(value) for value in inputs.values()):
        raise CaptureError(
            f"`{type(model).__name__}` was given no tensor to capture it with; give example inputs for "
            f"forward{signature}"
        )
    return CallForm(tuple(parameters), tuple(inputs), fixed, frozenset(), variadic, len(args)), inputs


def _named(
    signature: inspect.Signature, bound: inspect.BoundArguments
) -> tuple[dict[str, object], list[Parameter], tuple[str, ...]]:
    """Return the bound values by flat name, the parameters, and the names that came from ``*args``."""
    values: dict[str, object] = {}
    parameters: list[Parameter] = []
    variadic: list[str] = []
    for name, parameter in signature.parameters.items():
        if parameter.kind is parameter.VAR_POSITIONAL:
            for index, value in enumerate(bound.arguments.get(name, ())):
                variadic.append(free_name(f"{name}_{index}", {*signature.parameters, *bound.kwargs}))
                values[variadic[-1]] = value
                parameters.append(Parameter(variadic[-1], positional=True, keyword=False, required=True))
        elif parameter.kind is parameter.VAR_KEYWORD:
            for key, value in bound.arguments.get(name, {}).items():
                values[key] = value
                parameters.append(Parameter(key, positional=False, keyword=True, required=False))
        else:
            if name in bound.arguments:
                values[name] = bound.arguments[name]
            parameters.append(_declared(parameter))
    return values, parameters, tuple(variadic)


def _declared(parameter: inspect.Parameter) -> Parameter:
    required = parameter.default is _EMPTY
    return Parameter(
        parameter.name,
        positional=parameter.kind is not parameter.KEYWORD_ONLY,
        keyword=parameter.kind is not parameter.POSITIONAL_ONLY,
        required=required,
        default=None if required else parameter.default,
    )


def _holds_tensor(value: object) -> bool:
    return any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves(value))


class InputBinding:
    """Binds the arguments of a call, as the model's ``forward`` takes them, to the inputs of a captured graph.

    An argument that was not given when the model was captured may only be None or its default; one that was baked in
    may only be repeated. An input that is left out is filled in if the form has a value for it.

    Args:
        form: how the model was called when it was captured.
        model_name: the model's class, for messages.
        structures: the dataclasses and caches that the graph's inputs and outputs consist of.
        nestings: how the containers of inputs nest, by name; other inputs are not checked.

    >>> form = CallForm((Parameter("x", True, True, True), Parameter("mask", True, True, False)), ("x",))
    >>> InputBinding(form, "Model")((torch.ones(1),), {"mask": None})
    {'x': tensor([1.])}
    """

    def __init__(
        self,
        form: CallForm,
        model_name: str,
        structures: tuple[type, ...] = (),
        nestings: Mapping[str, Nesting | None] | None = None,
    ) -> None:
        self.form = form
        self.model_name = model_name
        self.structures = structures
        self.nestings = dict(nestings or {})
        self._positional = tuple(parameter.name for parameter in form.parameters if parameter.positional)
        self._defaults = {parameter.name: parameter.default for parameter in form.parameters}
        # A call with nothing but the inputs leaves each constant at its default, so that has to be what was baked in.
        is_repeated = (name in form.implied or _same(self._defaults.get(name), form.fixed[name]) for name in form.fixed)
        takes_tensors = all(is_repeated) and not any(self.nestings.values())
        self._plain = frozenset(form.inputs) if takes_tensors else frozenset()  # of calls with tensors alone
        in_order = self._positional[: len(form.inputs)] == form.inputs
        self._count = len(self._plain) if in_order else 0  # of tensors by position that need no sorting

    def __setstate__(self, state: Mapping[str, Any]) -> None:
        """Restore the state, and register the classes of inputs and outputs, which another process may not know."""
        vars(self).update(state)
        register_again(self.structures)

    def __call__(self, args: tuple[object, ...], kwargs: dict[str, Any]) -> dict[str, object] | None:
        """Return the graph's inputs by name, in order; None if the call gives them as tensors by position."""
        # The two ordinary calls cost one comparison each: this runs before every call of the model.
        if len(args) == self._count and not kwargs and {*map(type, args)} == _TENSOR:
            return None
        if kwargs.keys() == self._plain and not args and {*map(type, kwargs.values())} == _TENSOR:
            return {name: kwargs[name] for name in self.form.inputs}
        return self.bound(args, kwargs)

    def bound(self, args: tuple[object, ...], kwargs: dict[str, Any]) -> dict[str, object]:
        """Return the graph's inputs by name, in order, after all checks of a call."""
        values = {name: value for name, value in self.by_name(args, kwargs).items() if name not in self.form.ignored}
        inputs = {name: values.pop(name) for name in self.form.inputs if name in values}
        ids = inputs.get(IDS)
        for name, number in self.form.absent.items():
            if inputs.get(name) is None and isinstance(ids, torch.Tensor):
                inputs[name] = torch.full_like(ids, number, dtype=torch.int64)
        missing = [name for name in self.form.inputs if inputs.get(name) is None]
        if missing:
            names = ", ".join(f"`{name}`" for name in missing)
            raise CaptureError(
                f"the captured {self.model_name} needs {names}, which it was captured with; pass it, or capture the "
                f"model again without it"
            )
        for name, baked in self.form.fixed.items():
            implied = name in self.form.implied
            # For a call without the argument, the model would use its default.
            value = values.pop(name, baked if implied else self._defaults.get(name))
            if not (_same(value, baked) or (implied and value is None)):
                raise CaptureError(
                    f"the captured {self.model_name} has {name}={baked!r} baked in, and was called with "
                    f"{name}={value!r}; pass {name}={baked!r}, or capture the model again with {name}={value!r}"
                )
        for name, value in values.items():
            if value is not None and not (name in self._defaults and _same(value, self._defaults[name])):
                raise CaptureError(
                    f"the captured {self.model_name} was captured without `{name}`, so that the graph does not use "
                    f"it; capture the model again with `{name}`, or leave it out"
                )
        for name in inputs.keys() & self.nestings.keys():
            check_nesting(inputs[name], self.nestings[name], name, self.model_name)
        return {name: inputs[name] for name in self.form.inputs}

    def by_name(self, args: tuple[object, ...], kwargs: dict[str, Any]) -> dict[str, object]:
        """Return all arguments by name; none may be given twice."""
        if len(args) > len(self._positional):
            raise CaptureError(
                f"the captured {self.model_name} takes {len(self._positional)} positional arguments, and {len(args)} "
                f"were given"
            )
        values: dict[str, object] = dict(zip(self._positional, args, strict=False))
        for name, value in kwargs.items():
            if name in values:
                raise CaptureError(f"`{name}` was given to the captured {self.model_name} twice")
            values[name] = value
        return values


def _same(value: object, baked: object) -> bool:
    # 1, 1.0 and True are equal; and `==` of tensors is a tensor.
    return type(value) is type(baked) and bool(value == baked) if not _holds_tensor(value) else False
