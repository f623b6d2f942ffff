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
from fxopt_capture.call.nesting import nesting_of, other_nesting
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
        # A buffer that the call has assigned anew is no longer one of the copies, and is not compared.
        now = {id(buffer) for each in module.modules() for buffer in each._buffers.values()}
        return _Run(output, inputs, {name: buffer for name, buffer in copies.items() if id(buffer) in now})


def difference_of_calls(model: nn.Module, form: CallForm, inputs: Mapping[str, object]) -> str | None:
    """Return how the second of two calls on the same inputs and buffers differs, or None.

    The model stays as it is, and its exceptions pass through.
    """
    with kept(model), torch.no_grad():
        buffers = [(module, dict(module._buffers)) for module in model.modules()]
        outputs = []
        for _ in range(2):
            for module, originals in buffers:
                # Buffers as before: the graph counts in them too, and only attributes may make a difference here.
                module._buffers.update(originals)
            _copy_buffers(model)
            args, kwargs = form.arguments(_cloned(inputs))
            with random_state_kept(model, inputs):
                outputs.append(model(*args, **kwargs))
        return _mismatch(model, *outputs)


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
                # One copy for all names of a buffer, so that each of them shows what is written.
                copied = copies.setdefault(id(buffer), buffer.clone())
                named[f"{prefix}.{name}".lstrip(".")] = module._buffers[name] = copied
    return named


def _mismatch(model: nn.Module, expected: object, found: object, name: str = "output") -> str | None:
    nesting = other_nesting(nesting_of(found), nesting_of(expected), name)
    if nesting is not None:
        return f"{nesting[0]} is {nesting[1]} where the model returns {nesting[2]}"
    before, after = (
        {name + pytree.keystr(path): leaf for path, leaf in pytree.tree_leaves_with_path(tree)}
        for tree in (expected, found)
    )
    wrong = next(differing(before, after, [*model.parameters()] or before.values()), None)
    return None if wrong is None else f"{wrong.path} {wrong.problem}"
