"""Which exports are tried, in which order, and for which inputs the result is known to be right."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxopt_capture._torch import counting, graph_module_of, unmark
from fxopt_capture.call.arguments import CallForm
from fxopt_capture.call.guards import InputGuards
from fxopt_capture.call.names import unknown_names
from fxopt_capture.exporting.budget import Budget, OverBudgetError
from fxopt_capture.exporting.compare import takes
from fxopt_capture.exporting.conditions import read_guards, squeezed
from fxopt_capture.exporting.dynamic import (
    DimensionsOf,
    automatic_shapes,
    batch_dimension,
    dimensions_requested,
    requested_shapes,
    widened,
)
from fxopt_capture.exporting.failure import capture_error, first_line, is_about_values, source_of
from fxopt_capture.exporting.images import Place, enlarged, image_sizes
from fxopt_capture.exporting.inequalities import beyond_small_sizes, distinct
from fxopt_capture.exporting.known_values import named_like_sizes
from fxopt_capture.exporting.modes import captured_mode
from fxopt_capture.exporting.observer import Observer
from fxopt_capture.exporting.program import export_program
from fxopt_capture.exporting.small_sizes import is_equal, open_questions, refuted, sizes_against
from fxopt_capture.one_at_a_time import raise_interrupt
from fxopt_capture.weightless import device_for, is_weightless, restore_tensors, stand_ins
from fxopt_core import iter_nodes
from fxopt_core.errors import CaptureError


@dataclass(frozen=True)
class Preparation:
    """A context to export in.

    Attributes:
        note: a note for the user on a graph that was made in it, or None.
    """

    context: Callable[[], AbstractContextManager[object]] = nullcontext
    note: str | None = None


@dataclass(frozen=True)
class Request:
    """What is to be exported.

    Attributes:
        dimensions: the dimensions to make dynamic if the caller gave no `dynamic_shapes`, then fewer to try next.
        preparations: contexts to export in; the next is tried if the one before does not help.
        widens: whether a batch of one is exported as one of two, so that its size can be dynamic.
        observer: notes what the graph does not show.
        errors: the errors of exports so far.
    """

    model: nn.Module
    form: CallForm
    inputs: Mapping[str, object]
    dynamic_shapes: Any
    dimensions: Sequence[DimensionsOf] = (batch_dimension,)
    preparations: Sequence[Preparation] = (Preparation(),)
    widens: bool = True
    observer: Observer = field(default_factory=Observer)
    errors: list[Exception] = field(default_factory=list)


@dataclass(frozen=True)
class Export:
    """An exported model: a module of the graph and everything it reads, the guards, and the inputs of the export.

    `values` are ``meta["val"]`` of the placeholders; `note` is for the user.
    """

    module: GraphModule
    guards: InputGuards
    inputs: Mapping[str, object]
    values: Sequence[object]
    note: str | None = None


def export(request: Request) -> Export:
    """Export a model with as many of the requested dimensions dynamic as it allows.

    If the model depends on values of inputs that decide sizes, the graph is for the values of the example alone, unless
    the caller has named sizes that vary.
    """
    first = len(request.errors)
    try:
        return _export(request)
    except CaptureError:
        known = {} if request.dynamic_shapes is not None else named_like_sizes(request.inputs)
        if is_weightless(request.model):  # inputs on the meta device have become ones
            known = {name: value for name, value in known.items() if not (value == 1).all()}
        if not known or not any(map(is_about_values, request.errors[first:])):
            raise
        request.observer.known = known
        found = _export(replace(request, errors=[]))
        names = " and ".join(f"`{name}`" for name in sorted(request.observer.read))
        note = f"the graph is for these values of {names} alone, as they decide sizes" if names else None
        return replace(found, note="; ".join(filter(None, (note, found.note))) or None)


def _export(request: Request) -> Export:
    """Export a model; see `export`.

    If an export fails in the same way as in an earlier preparation, no other sizes are tried in this one.
    """
    errors, first = request.errors, len(request.errors)
    attempts = _attempts(request)
    for preparation in request.preparations:
        for inputs, shapes, larger in attempts:
            before = len(errors)
            with preparation.context():
                found = _export_for_all_sizes(request, inputs, shapes)
                is_right = found is not None and (larger is None or _is_right(request, found, larger))
            if found is not None and is_right:
                if request.widens and request.dynamic_shapes is None and not _takes(found, request.inputs):
                    return _export(replace(request, widens=False))  # the model treats one row differently
                note = "; ".join(filter(None, (preparation.note, _fixed_note(errors[first:before])))) or None
                return replace(found, note=note)
            is_wide = [*map(id, pytree.tree_leaves(inputs))] != [*map(id, pytree.tree_leaves(request.inputs))]
            if not is_wide and any(_seen(error, errors[:before]) for error in errors[before:]):
                break
    # There is one, since the last attempt has no budget: it fixes all sizes, or has those that the caller named.
    cause = next(error for error in errors[first:] if not isinstance(error, OverBudgetError))
    raise capture_error(request.model, cause, unknown_names(request.model, request.form)) from cause


def _fixed_note(errors: Sequence[Exception]) -> str | None:
    """Return a note on sizes that were fixed because exports with dynamic ones took too long, or None."""
    found = next((error for error in errors if isinstance(error, OverBudgetError)), None)
    if found is None:
        return None
    return (
        f"{found}, so that some sizes are fixed to those of the example; sizes that you name in "
        "`dynamic_shapes` stay dynamic, without a time limit"
    )


def _seen(error: Exception, others: Sequence[Exception]) -> bool:
    """Return whether the model failed in the same place for the same reason before."""
    if isinstance(error, OverBudgetError):  # with fewer sizes, it may not
        return False
    found = source_of(error), first_line(error)
    return found[0] is not None and any((source_of(other), first_line(other)) == found for other in others)


Inputs = Mapping[str, object]


def _attempts(request: Request) -> list[tuple[Inputs, Any, Inputs | None]]:
    """Return example inputs and dynamic shapes to try, the most general first, and inputs with larger images if any."""
    if request.dynamic_shapes is not None:
        shapes = requested_shapes(request.form, request.dynamic_shapes, request.inputs)
        return [(widened(request.inputs, dimensions_requested(shapes)), shapes, None)]
    if known := request.observer.known:
        free = {name: value for name, value in request.inputs.items() if name not in known}
        shapes = [*(automatic_shapes(free, each) for each in request.dimensions), None]
        return [(request.inputs, each, None) for each in shapes]
    images, larger = _larger_images(request)
    found: list[tuple[Inputs, Any, Inputs | None]] = []
    for dimensions_of in request.dimensions:
        wide = widened(request.inputs, dimensions_of) if request.widens else request.inputs
        if images:
            found.append((wide, automatic_shapes(wide, dimensions_of, images), larger))
        found.append((wide, automatic_shapes(wide, dimensions_of), None))
    return [*found, (request.inputs, None, None)]


def _larger_images(request: Request) -> tuple[list[Place], Inputs]:
    """Return the sizes of images, none if the model does not take other sizes, and the inputs with larger images.

    Calling a model shows at once if it takes only one size; an export with dynamic sizes would take several times as
    long to find out. Models that read text take lines of one height and any width.
    """
    images = image_sizes(request.model, request.inputs)
    if images and not is_weightless(request.model):
        # Heights (dimension 2) with widths (3), then widths alone.
        for places in (images, [place for place in images if place[1] == 3]):
            larger = enlarged(request.inputs, places)
            if takes(request.model, request.form, larger):
                return places, larger
    return [], request.inputs


def _is_right(request: Request, found: Export, larger: Inputs) -> bool:
    """Return whether a graph either refuses larger images or computes the same on them as the model."""
    return not _takes(found, larger) or is_equal(request.model, request.form, found.module, larger)


def _takes(found: Export, inputs: Inputs) -> bool:
    return found.guards.accepts(pytree.tree_leaves(dict(inputs)))


def _export_for_all_sizes(request: Request, inputs: Mapping[str, object], shapes: Any) -> Export | None:
    """Export with guards that hold for small sizes too, or note the errors and return None.

    The export for small sizes is tried first. Those of its guards that always hold for sizes from 2 are replaced by a
    comparison at smaller ones, and so are those that the usual export lacks, if the first one fails.
    """
    if shapes is None:
        return _try(request, inputs, shapes, small_sizes=False)
    known = len(request.errors)
    found = _try(request, inputs, shapes, small_sizes=True)
    strict = None if found is None else found.guards
    if found is None:
        error = request.errors[-1]
        # In these cases, the export without small sizes would fail as well.
        if is_about_values(error) or _seen(error, request.errors[:known]) or isinstance(error, OverBudgetError):
            return None
        found = _try(request, inputs, shapes, small_sizes=False)
        if found is None:
            return None
    guards = InputGuards(found.guards.specs, beyond_small_sizes(found.guards.conditions), found.guards.mode)
    leaves = pytree.tree_leaves(dict(inputs))
    asked = open_questions(found.values, guards, leaves)
    refused = [question for question in asked if strict is None or not strict.accepts(question.applied(leaves))]
    guards = guards if refused else found.guards
    # 0 is compared even where no guard refuses it, since a branch on 0 leaves no guard.
    asked = [question for question in asked if question in refused or 0 in question.sizes.values()]
    together = open_questions(found.values, guards, leaves, alike=True)
    if not is_weightless(request.model):  # which cannot be compared, and would refuse every batch of one
        # Sizes that vary together are compared at 1 even without a guard: a branch within an operator leaves none.
        asked += [each for each in together if each not in asked and 0 not in each.sizes.values()]
    compared = request.model, request.form, found.module, inputs, request.observer.known
    conditions = list(guards.conditions)
    for question in refuted(asked, *compared):
        # A size may be wrong alone and right with others: an empty mask is wrong for texts, and right for none.
        wider = [other for other in together if question.sizes.items() < other.sizes.items()][:1]
        conditions += question.refusal(wider[0] if wider and not refuted(wider, *compared) else None)
    for condition in dict.fromkeys(squeezed(found.module, found.values)):
        against = sizes_against(condition, found.values, InputGuards(guards.specs, conditions, guards.mode), leaves)
        if against is None or refuted([against], *compared):
            conditions.append(condition)
    guards = InputGuards(guards.specs, distinct(conditions), guards.mode)
    if not guards.accepts(leaves):
        request.errors.append(CaptureError("the number of its dimensions follows from sizes that are 1 in the example"))
        return None
    return replace(found, guards=guards)


def _try(request: Request, inputs: Mapping[str, object], shapes: Any, *, small_sizes: bool) -> Export | None:
    """Export with these shapes, or note the error and return None."""
    model, handled = request.model, sys.exc_info()[1]
    # Sizes that the caller has named may take as long as they need.
    is_bounded = shapes is not None and request.dynamic_shapes is None
    try:
        with stand_ins(model, device_for(model, inputs)), counting(Budget().counted) if is_bounded else nullcontext():
            program = export_program(
                model, request.form, inputs, shapes, small_sizes=small_sizes, observer=request.observer
            )
    except Exception as error:  # whatever the model or torch raises while it is traced
        unmark(dict(inputs))
        raise_interrupt(error, handled)
        request.errors.append(error)
        return None
    module = graph_module_of(program)
    restore_tensors(module, model)
    values = [node.meta.get("val") for node in iter_nodes(module.graph) if node.op == "placeholder"]
    read = {name: request.observer.known[name] for name in request.observer.read}
    guards = read_guards(program, inputs, values, captured_mode(model), read)
    return Export(module, guards, inputs, values)
