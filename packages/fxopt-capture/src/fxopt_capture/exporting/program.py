"""One call of ``torch.export.export``, with a ``forward`` that takes exactly the graph's inputs by name."""

from __future__ import annotations

import inspect
import io
import logging
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from fxopt_capture._torch import (
    any_number_of_steps,
    guarding,
)
from fxopt_capture.call.arguments import CallForm
from fxopt_capture.call.structures import register_structures
from fxopt_capture.exporting.observer import Observer, attributes_of, changed_attributes
from fxopt_core import kept


def export_program(
    model: nn.Module,
    form: CallForm,
    inputs: Mapping[str, object],
    dynamic_shapes: Any,
    *,
    small_sizes: bool,
    observer: Observer | None = None,
) -> ExportedProgram:
    """Export `model`, whatever the ambient grad mode, and leave it as it was.

    With `small_sizes`, a dynamic dimension may be 0 or 1, so that a branch of the model on such a size becomes a guard.
    Otherwise ``torch.export`` assumes that a dynamic dimension is at least 2, and a branch on 1 leaves no trace.
    """
    observed = _flat_forward(model, form, observer or Observer())
    with ready_to_export(model, small_sizes=small_sizes), observed, _quiet_failure():
        return torch.export.export(model, (), dict(inputs), dynamic_shapes=dynamic_shapes, strict=False)


@contextmanager
def ready_to_export(model: nn.Module, *, small_sizes: bool) -> Iterator[None]:
    """Set the modes that ``torch.export`` needs, wherever it is called from, and leave `model` as it was."""
    with (
        kept(model),
        torch.inference_mode(False),
        torch.enable_grad(),
        guarding(small_sizes=small_sizes),
        any_number_of_steps(),
    ):
        yield


@contextmanager
def _quiet_failure() -> Iterator[None]:
    """Drop what torch logs as errors and warnings, and what is written to ``sys.stderr`` if the export fails.

    torch writes the whole graph, and logs the traceback of an error that it raises as well.
    """
    written, thread = io.StringIO(), threading.get_ident()

    def is_shown(record: logging.LogRecord) -> bool:
        return record.levelno < logging.WARNING or record.thread != thread

    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.")]
    for name in names:  # not their handlers, which torch replaces when it imports its compiler
        logging.getLogger(name).addFilter(is_shown)
    try:
        with redirect_stderr(written):
            yield
    finally:
        for name in names:
            logging.getLogger(name).removeFilter(is_shown)
    sys.stderr.write(written.getvalue())


@contextmanager
def _flat_forward(model: nn.Module, form: CallForm, observer: Observer) -> Iterator[None]:
    """Wrap the model's forward and hooks in a forward that takes exactly the graph's inputs, by name.

    ``torch.export`` reads names and their order from the signature, and would treat ``**kwargs`` as one argument.
    `kept` removes the wrapper. A ``__call__`` of the model's own may pass its arguments on by position.
    """
    original = _call_with_hooks(model)
    before = attributes_of(model)

    def forward(*given: object, **inputs: object) -> object:
        named = zip((*(each.name for each in form.parameters), *form.variadic), given, strict=False)
        inputs.update((name, value) for name, value in named if name in form.inputs)
        args, kwargs = form.arguments(inputs)
        with _NormalTensors():
            output = observer.run(original, args, kwargs, inputs)
        observer.stepped.update(changed_attributes(before, attributes_of(model)))
        register_structures(output)
        return output

    vars(model)["forward"] = taking(form.inputs, forward)
    yield


def taking(names: Iterable[str], forward: Callable[..., object]) -> Callable[..., object]:
    """Let a function take arguments of these names, as ``torch.export`` reads them from its signature."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in names])
    forward.__signature__ = signature  # type: ignore[attr-defined]  # read by inspect.signature
    return forward


class _NormalTensors(TorchFunctionMode):
    """While open, replaces tensors that were made in inference mode, which autograd does not take, by copies.

    A model that was called in this mode may keep tables that it made then, in attributes or elsewhere.
    """

    def __init__(self) -> None:
        super().__init__()
        self.copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # the originals too, so that none gets their ids

    def __torch_function__(
        self, func: Any, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function on normal tensors."""
        kwargs = kwargs or {}
        if not torch.compiler.is_dynamo_compiling():  # which follows the branches of `torch.cond`
            args, kwargs = pytree.tree_map_only(torch.Tensor, self._normal, (args, kwargs))
        return func(*args, **kwargs)

    def _normal(self, tensor: torch.Tensor) -> torch.Tensor:
        if type(tensor) is not torch.Tensor or not tensor.is_inference():
            return tensor
        if id(tensor) not in self.copies:
            self.copies[id(tensor)] = tensor, tensor.clone()
        return self.copies[id(tensor)][1]


def _call_with_hooks(model: nn.Module) -> Callable[..., object]:
    """Return a function that calls the model's ``forward`` and hooks, and remove the hooks; `kept` restores them.

    ``torch.export`` calls the model with the inputs of the graph, by name. Hooks must see the call as it was made, by
    position and with the arguments that are not inputs.
    """
    forward: Callable[..., object] = model.forward
    before = [(hook, key in model._forward_pre_hooks_with_kwargs) for key, hook in model._forward_pre_hooks.items()]
    after = [(hook, key in model._forward_hooks_with_kwargs) for key, hook in model._forward_hooks.items()]
    model._forward_pre_hooks.clear()
    model._forward_hooks.clear()

    def call(*args: object, **kwargs: object) -> object:
        for hook, with_kwargs in before:
            changed = hook(model, args, kwargs) if with_kwargs else hook(model, args)
            if changed is not None and with_kwargs:
                args, kwargs = changed
            elif changed is not None:
                args = changed if isinstance(changed, tuple) else (changed,)
        output = forward(*args, **kwargs)
        for hook, with_kwargs in after:
            changed = hook(model, args, kwargs, output) if with_kwargs else hook(model, args, output)
            output = output if changed is None else changed
        return output

    return call
