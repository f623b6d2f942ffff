"""Which exports are tried, in which order, and what the result is known to be right for."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxopt_core.graph import iter_nodes

from .arguments import CallForm
from .conditions import distinct, read_guards
from .dynamic import DimensionsOf, automatic_shapes, dimensions_requested, requested_shapes, widened
from .exporting import export_program
from .failure import capture_error
from .guards import InputGuards
from .modes import captured_mode
from .small_sizes import open_questions, refuted

Preparation = Callable[[], AbstractContextManager[object]]


@dataclass(frozen=True)
class Request:
    """What is to be exported.

    Attributes:
        model: the model.
        form: how it is called.
        inputs: example inputs by name.
        dynamic_shapes: those that the caller gave, or None.
        dimensions_of: the dimensions to make dynamic where the caller gave none.
        preparations: contexts to export in; the next is tried where the one before does not help.
    """

    model: nn.Module
    form: CallForm
    inputs: Mapping[str, object]
    dynamic_shapes: Any
    dimensions_of: DimensionsOf
    preparations: Sequence[Preparation] = (nullcontext,)


@dataclass(frozen=True)
class Export:
    """An exported model: its graph module, as torch unlifts it without guards, and the guards.

    Attributes:
        module: the graph module.
        guards: what its inputs must be.
        inputs: the example inputs that it was exported with.
        values: ``meta["val"]`` of its placeholders.
    """

    module: GraphModule
    guards: InputGuards
    inputs: Mapping[str, object]
    values: Sequence[object]


def export(request: Request) -> Export:
    """Export a model with as many of the requested dimensions dynamic as it allows.

    Raises:
        CaptureError: it cannot be exported at all.
    """
    errors: list[Exception] = []
    for preparation in request.preparations:
        for inputs, shapes in _attempts(request):
            with preparation():
                found = _export_for_all_sizes(request, inputs, shapes, errors)
            if found is not None:
                return found
    raise capture_error(request.model, errors[0]) from errors[0]


def _attempts(request: Request) -> list[tuple[Mapping[str, object], Any]]:
    """Return example inputs and dynamic shapes to try, the most general first."""
    if request.dynamic_shapes is not None:
        shapes = requested_shapes(request.form, request.dynamic_shapes)
        return [(widened(request.inputs, dimensions_requested(shapes)), shapes)]
    wide = widened(request.inputs, request.dimensions_of)
    attempts: list[tuple[Mapping[str, object], Any]] = [(wide, automatic_shapes(wide, request.dimensions_of))]
    return [*attempts, (request.inputs, None)]


def _export_for_all_sizes(
    request: Request, inputs: Mapping[str, object], shapes: Any, errors: list[Exception]
) -> Export | None:
    """Export with guards that hold for small sizes too, or note the error and return None."""
    if shapes is None:
        return _try(request, inputs, shapes, errors, small_sizes=False)
    cautious = _try(request, inputs, shapes, errors, small_sizes=True)
    leaves = pytree.tree_leaves(dict(inputs))
    if cautious is not None:
        anything = InputGuards(cautious.guards.specs, ())
        if not open_questions(cautious.values, anything, cautious.guards, leaves):
            return cautious
    usual = _try(request, inputs, shapes, errors, small_sizes=False)
    if usual is None:
        return cautious
    asked = open_questions(usual.values, usual.guards, None if cautious is None else cautious.guards, leaves)
    wrong = refuted(asked, request.model, request.form, usual.module, inputs)
    conditions = [*usual.guards.conditions, *(question.refusal(usual.guards) for question in wrong)]
    guards = InputGuards(usual.guards.specs, distinct(conditions), usual.guards.mode)
    return Export(usual.module, guards, inputs, usual.values)


def _try(
    request: Request, inputs: Mapping[str, object], shapes: Any, errors: list[Exception], *, small_sizes: bool
) -> Export | None:
    try:
        program = export_program(request.model, request.form, inputs, shapes, small_sizes=small_sizes)
    except Exception as error:  # whatever the model or torch raises while it is traced
        errors.append(error)
        return None
    return _read(request.model, program, inputs)


def _read(model: nn.Module, program: ExportedProgram, inputs: Mapping[str, object]) -> Export:
    module = program.module(check_guards=False)
    values = [node.meta.get("val") for node in iter_nodes(module.graph) if node.op == "placeholder"]
    guards = read_guards(program, inputs, values, captured_mode(model))
    if not isinstance(module, GraphModule):
        raise TypeError(f"torch.export unlifted the model to a {type(module).__name__}, not to a GraphModule")
    return Export(module, guards, inputs, values)
