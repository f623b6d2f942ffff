"""Run a model and its graph on the same inputs, leaving both as they were, and compare."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import nn
from torch.utils import _pytree as pytree

from fxopt_capture.call.arguments import CallForm
from fxopt_capture.call.caches import is_cache_type
from fxopt_capture.call.nesting import Nesting, context_difference, nesting_of
from fxopt_capture.exporting.random_state import random_state_kept
from fxopt_core import kept
from fxopt_tools import differing


class GraphError(Exception):
    """A graph raises an error, which this chains, for inputs that the model takes."""


@dataclass(frozen=True)
class _Run:
    """The results of a call: its output, its inputs afterwards, and the buffers that it may write in place."""

    output: object
    inputs: Mapping[str, object]
    buffers: Mapping[str, torch.Tensor]


def difference(
    model: nn.Module,
    form: CallForm,
    graph_module: nn.Module,
    inputs: Mapping[str, object],
    constants: Mapping[str, object] = MappingProxyType({}),
    *,
    effects: bool = False,
    gradients: bool = False,
) -> str | None:
    """Return how the graph's outputs differ from the model's on `inputs`, or None if they agree.

    With `effects`, inputs and buffers that a call changes in place are compared too. Buffers, the random state and the
    inputs stay as they are. Exceptions of the model pass through; those of the graph are chained by a `GraphError`.

    The graph module gets the inputs and `constants` by name. Both run with `gradients` if asked for.
    """
    expected = _run_model(model, form, inputs, gradients=gradients)
    given = _cloned(inputs)
    try:
        found = _run(graph_module, (), {**given, **constants}, given, gradients=gradients)
    except Exception as error:
        raise GraphError(f"the graph raises {type(error).__name__}: {error}") from error
    reason = _mismatch(model, expected.output, found.output)
    if reason is not None or not effects:
        return reason
    changed = {name: buffer for name, buffer in expected.buffers.items() if name in found.buffers}
    return _mismatch(model, expected.inputs, found.inputs, "after the call, the input") or _mismatch(
        model, changed, {name: found.buffers[name] for name in changed}, "after the call, the buffer"
    )


def difference_in_call(
    model: nn.Module, form: CallForm, captured: nn.Module, inputs: Mapping[str, object]
) -> str | None:
    """Return how a call of a captured module differs from that of the model, effects included, or None.

    Some of torch's layers compute differently without gradients, so it is enough if they agree with them.
    """
    found = difference(model, form, captured, inputs, form.fixed, effects=True)
    if found is not None and torch.is_grad_enabled():
        found = difference(model, form, captured, inputs, form.fixed, effects=True, gradients=True) and found
    return found


def takes(model: nn.Module, form: CallForm, inputs: Mapping[str, object]) -> bool:
    """Return whether a model raises no exception when it is called as in `difference`."""
    try:
        _run_model(model, form, inputs)
    except Exception:  # whatever the model raises
        return False
    return True


def is_same_call(model: nn.Module, form: CallForm, one: Mapping[str, object], other: Mapping[str, object]) -> bool:
    """Return whether a model takes two sets of inputs by name, and returns the same for both; it stays as it is."""
    try:
        left, right = (_run_model(model, form, given) for given in (one, other))
    except Exception:  # whatever the model raises
        return False
    return _mismatch(model, left.output, right.output) is None


def _run_model(model: nn.Module, form: CallForm, inputs: Mapping[str, object], *, gradients: bool = False) -> _Run:
    given = _cloned(inputs)
    return _run(model, *form.arguments(given), given, gradients=gradients)


def _run(
    module: nn.Module,
    args: Sequence[object],
    kwargs: Mapping[str, object],
    inputs: Mapping[str, object],
    *,
    gradients: bool,
) -> _Run:
    with (
        random_state_kept(module, inputs),
        kept(module),
        torch.enable_grad() if gradients else torch.no_grad(),
        redirect_stderr(io.StringIO()),  # where graph modules print the line at which they fail
    ):
        copies = _copy_buffers(module)
        output = module(*args, **kwargs)
        now = {id(buffer) for each in module.modules() for buffer in each._buffers.values()}
        return _Run(output, inputs, {name: buffer for name, buffer in copies.items() if id(buffer) in now})


def effect_of(
    attributes: Mapping[str, object], model: nn.Module, form: CallForm, inputs: Mapping[str, object]
) -> str | None:
    """Return how a model's outputs on `inputs` change with other values of attributes, or None if they do not.

    `attributes` has the other values by dotted name. If a second call returns the same as the first, the outputs do not
    depend on them. The model stays as it is, and its exceptions pass through.
    """

    def output() -> object:
        _copy_buffers(model)
        args, kwargs = form.arguments(_cloned(inputs))
        with random_state_kept(model, inputs):
            return model(*args, **kwargs)

    with kept(model), torch.no_grad():
        first = output()
        if _mismatch(model, first, output()) is None:
            return None
    with kept(model), torch.no_grad():
        for name, value in attributes.items():
            owner, _, last = name.rpartition(".")
            vars(model.get_submodule(owner))[last] = value
        return _mismatch(model, first, output())


def _cloned(inputs: Mapping[str, object]) -> dict[str, object]:
    return {
        name: pytree.tree_map_only(torch.Tensor, lambda tensor: tensor.detach().clone(), value)
        for name, value in inputs.items()
    }


def _copy_buffers(root: nn.Module) -> dict[str, torch.Tensor]:
    """Give a module copies of its buffers to write to, and return them by name; `kept` gives it back its own."""
    copies: dict[int, torch.Tensor] = {}
    named: dict[str, torch.Tensor] = {}
    for prefix, module in root.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                copied = copies.setdefault(id(buffer), buffer.clone())
                named[f"{prefix}.{name}".lstrip(".")] = module._buffers[name] = copied
    return named


def _mismatch(model: nn.Module, expected: object, found: object, name: str = "output") -> str | None:
    if (reason := _other_nesting(nesting_of(expected), nesting_of(found), name)) is not None:
        return reason
    before, after = (
        {name + pytree.keystr(path): leaf for path, leaf in pytree.tree_leaves_with_path(tree)}
        for tree in (expected, found)
    )
    wrong = next(differing(before, after, [*model.parameters()] or before.values()), None)
    return None if wrong is None else f"{wrong.path} {wrong.problem}"


def _other_nesting(expected: Nesting, found: Nesting, name: str) -> str | None:
    """Return where containers differ in type, length or keys, and how; None if nowhere."""
    if (expected.kind, expected.labels) != (found.kind, found.labels):
        return f"{name} is {found} where the model returns {expected}"
    entries = zip(expected.labels, expected.entries, found.entries, strict=True)
    reasons = (_other_nesting(left, right, name + label) for label, left, right in entries)
    reason = next((reason for reason in reasons if reason is not None), None)
    if reason is None and is_cache_type(expected.kind) and expected.context != found.context:
        place, one, other = context_difference(found.context, expected.context)
        return f"{name}{place and f'.{place}'} is {one!r} where the model returns {other!r}"
    return reason
