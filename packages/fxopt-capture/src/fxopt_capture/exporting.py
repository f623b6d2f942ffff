"""One call of ``torch.export.export``, with the model's ``forward`` flattened to the names that the call gives."""

from __future__ import annotations

import inspect
import io
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx.experimental import _config as symbolic_shapes_config, symbolic_shapes

from .arguments import CallForm
from .observing import Observer, Steps
from .preserving import preserved
from .room import with_room
from .root_call import root_call
from .structures import register_structures


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

    Args:
        model: the model.
        form: how it is called.
        inputs: example inputs by name.
        dynamic_shapes: per input name, as ``torch.export`` takes them, or a ``ShapesCollection``.
        small_sizes: whether a dynamic dimension may be 0 or 1, so that a branch of the model on such a size becomes a
            guard. Otherwise ``torch.export`` takes a dynamic dimension to be at least 2, and a branch on 1 leaves no
            trace. (torch.onnx exports in this way too.)
        observer: runs the model's forward, and notes what the graph does not say.
    """
    observed = _flat_forward(model, form, observer or Observer())
    with ready_to_export(model, small_sizes=small_sizes), observed, _quiet_failure():
        return with_room(
            lambda: torch.export.export(model, (), dict(inputs), dynamic_shapes=dynamic_shapes, strict=False)
        )


@contextmanager
def ready_to_export(model: nn.Module, *, small_sizes: bool) -> Iterator[None]:
    """Let ``torch.export`` find the same modes wherever it is called from, and leave `model` as it was."""
    oblivious = symbolic_shapes_config.patch(backed_size_oblivious=small_sizes)  # type: ignore[attr-defined]  # installed at import
    with preserved(model), torch.inference_mode(False), torch.enable_grad(), oblivious, _guarding():
        yield


@contextmanager
def _guarding() -> Iterator[None]:
    """Let torch note what it assumes of sizes, also in a thread where that is suppressed.

    It is so for callers inside of ``ShapeEnv.suppress_guards()``, and stays so where what ends that was interrupted.
    Without guards, a graph would answer for sizes for which the model takes another branch.
    """
    former = symbolic_shapes.ShapeEnv._suppress_guards_tls()
    symbolic_shapes.TLS.suppress_guards = False
    try:
        yield
    finally:
        symbolic_shapes.TLS.suppress_guards = former


@contextmanager
def _quiet_failure() -> Iterator[None]:
    """Drop what is written to ``sys.stderr`` if the export fails: torch writes the whole graph there."""
    written = io.StringIO()
    with redirect_stderr(written):
        yield
    sys.stderr.write(written.getvalue())


@contextmanager
def _flat_forward(model: nn.Module, form: CallForm, observer: Observer) -> Iterator[None]:
    """Stand a forward that takes exactly the graph's inputs, by name, before the model's own and its hooks.

    ``torch.export`` reads names and their order off the signature; ``**kwargs`` there would be taken for one argument.
    `preserved` takes it away again.
    """
    original = root_call(model)
    steps = Steps(model)

    def forward(**inputs: object) -> object:
        args, kwargs = form.arguments(inputs)
        output = observer.run(original, args, kwargs, inputs)
        observer.stepped.update(steps.found())
        register_structures(output)
        return output

    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signature = inspect.Signature([inspect.Parameter(name, kind) for name in form.inputs])
    forward.__signature__ = signature  # type: ignore[attr-defined]  # read by inspect.signature
    vars(model)["forward"] = forward
    yield
