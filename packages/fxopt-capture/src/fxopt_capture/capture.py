"""Capture a model as a graph module that reads like the model."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.utils import _pytree as pytree

from fxopt_capture._torch import release_real_tensors
from fxopt_capture.call.arguments import CallForm, InputBinding, bind_call
from fxopt_capture.call.caches import CacheReturn, is_cache
from fxopt_capture.call.guards import GUARDS, InputGuards
from fxopt_capture.call.names import ignored_names
from fxopt_capture.call.nesting import nesting_of
from fxopt_capture.call.structures import (
    free_name,
    name_inputs,
    register_structures,
    return_plain_containers,
    separate_names,
    structures_of,
)
from fxopt_capture.captured import CapturedModule, assemble
from fxopt_capture.exporting.compare import GraphError, difference_in_call, difference_of_calls, takes
from fxopt_capture.exporting.dynamic import DimensionsOf, batch_dimension, distinct_tensors
from fxopt_capture.exporting.failure import described, first_line
from fxopt_capture.exporting.modes import training_note
from fxopt_capture.exporting.observer import Observer
from fxopt_capture.exporting.other_forms import compare_other_forms
from fxopt_capture.exporting.random_state import random_state_kept
from fxopt_capture.exporting.strategy import Export, Request, export
from fxopt_capture.graph.assertions import with_dtypes
from fxopt_capture.graph.raising import raise_layers
from fxopt_capture.graph.regions import hidden_note
from fxopt_capture.graph.shells import attribute, owner_of, registered, shell_tree
from fxopt_capture.graph.tidy import place_attributes, tidy
from fxopt_capture.huggingface.absent import absent_inputs
from fxopt_capture.huggingface.clients import keep_attributes
from fxopt_capture.huggingface.computed_buffers import computed_buffers
from fxopt_capture.huggingface.configurations import configurations_kept
from fxopt_capture.huggingface.models import (
    cache_choice,
    dynamic_dimensions,
    dynamic_dimensions_around,
    is_pretrained,
    is_sound,
    no_cache,
    preparations,
    pretrained_models,
)
from fxopt_capture.huggingface.stored_names import keep_stored_names
from fxopt_capture.one_at_a_time import one_at_a_time
from fxopt_capture.weightless import device_for, is_weightless, with_values
from fxopt_core import iter_nodes, type_text
from fxopt_core.errors import CaptureError
from fxopt_rewrite import outside_inference_mode

_LOGGER = logging.getLogger("fxopt_capture")
# Attributes that captured modules have besides those of their class.
_RESERVED = frozenset({"meta", GUARDS, "_input_binding"})
#: Compared with the names of all bases of a class, so that nothing of torch.distributed is imported.
_DISTRIBUTED = frozenset({"FSDPModule", "FullyShardedDataParallel", "DistributedDataParallel"})
_BEFORE_SHARDING = (
    "capture the model before it is sharded or wrapped, or rewrite it as it runs, by "
    'torch.compile(model, backend="fxopt")'
)


def capture(
    model: nn.Module,
    args: Sequence[object] | torch.Tensor = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    dynamic_shapes: Any = None,
    compare: bool = True,
) -> GraphModule:
    """Capture a model as a graph module whose layers, names and ``state_dict`` keys are the model's.

    The graph comes from ``torch.export``, which runs the model on tensors without values. Calls of linear, convolution,
    normalization and embedding layers become calls of modules, which share parameters and buffers with the model and
    nothing else; the model is not changed. The result takes the arguments and returns the outputs of the model.
    Inputs for which the graph is not valid are refused with a `CaptureError`: other sizes in static dimensions, sizes
    on which the model branches, arguments that were not given here, lists of another length and dictionaries with other
    keys. An example with a batch of one works for other batches too, unless the model treats one row differently
    from two. If the model distinguishes sizes of 0 or 1, model and graph are compared on slices of the example, and a
    size at which they differ is refused.

    A model on the meta device is captured for the device of its inputs, or for the CPU if these are on meta too. It
    takes no memory for weights; `load_checkpoint` reads them. For Hugging Face models, buffers that are not saved are
    computed as by ``from_pretrained``.

    At the end, model and graph are called with the example, and have to agree: in values, within the tolerances of
    `fxopt_rewrite.tolerances`, in the structure of the outputs, and in what they write to inputs and buffers. This
    takes the time of three calls and the memory of one. The model stays as it was, including its configuration.
    A model on the meta device is not compared, and its graph refuses sizes of 0 and 1, and images of other sizes, where
    only a comparison would show that it is right. Integer and boolean masks of zeros and ones, recognised by "mask" in
    their names, are compared once more as ones (or with a zero, if they were ones): if the graph differs, it refuses
    such masks. If the model reads strides, inputs are compared once more with other strides, in the same way. For a
    Hugging Face model, two more calls show whether the attention mask and the token types may be left out, and the
    graph then accepts the same calls.

    If the model makes sizes of the values of an input, such as ``grid_thw`` of images, the graph is for the values of
    the example, and the logger says so, unless `dynamic_shapes` are given. Such inputs are small integer tensors, not
    in containers, that are named like a grid, sizes or lengths; a model that depends on the values of others cannot be
    captured.

    One thread captures at a time, and others wait.

    Graphs of Hugging Face decoders return a cache of keys and values if the model does, that is, unless
    ``use_cache=False`` is in `kwargs` or in its configuration. A cache that is given (``past_key_values``; ``cache``
    from transformers 5.24 on) is an input, which the graph module extends as the model does. (`symbolic_trace` makes no
    cache.)

    Args:
        model: the model, in the mode (``train``, ``eval``) that the graph is to have.
        args: positional example arguments of its ``forward``, or one tensor.
        kwargs: keyword example arguments. Tensors, and containers with tensors, become inputs of the graph; everything
            else is baked in.
        dynamic_shapes: which sizes may vary, as in ``torch.export.export``, by argument name. None: as far as the model
            allows, the first dimension of every tensor, the length of texts for Hugging Face models, nested ones too,
            the number of steps of recurrent layers, and height and width of images that convolutions read.
        compare: whether to compare model and graph on the example. Without it, a wrong graph goes unnoticed; False is
            for models so large that a call takes too long.

    Returns:
        The graph module, in the model's mode.

    Raises:
        CaptureError: `model` is not a module that can be captured, does not take these arguments, or does something
            that one graph cannot express, and the message has the place in the model's source; or the graph does not
            compute what the model does on the example, and the message has the output that differs.

    >>> model = nn.Sequential(nn.Linear(4, 3), nn.ReLU()).eval()
    >>> graph_module = capture(model, torch.randn(2, 4))
    >>> [node.target for node in iter_nodes(graph_module.graph) if node.op == "call_module"]
    ['_guards_fn', '0']
    >>> graph_module(torch.randn(7, 4)).shape
    torch.Size([7, 3])
    """
    if isinstance(args, Mapping):
        raise CaptureError("args is a mapping; give keyword arguments as kwargs, or one mapping as args=(mapping,)")
    positional = (args,) if isinstance(args, torch.Tensor) else tuple(args)
    with one_at_a_time():
        return capture_call(model, read_call(model, positional, kwargs or {}), dynamic_shapes, compare=compare)


@dataclass(frozen=True)
class Call:
    """One call of a model: its form, and the inputs of the graph by name."""

    form: CallForm
    inputs: Mapping[str, object]


def read_call(
    model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object], *, without_cache: bool = False
) -> Call:
    """Bind a call to the names of the model's ``forward``.

    With `without_cache`, a Hugging Face model makes no cache of keys and values unless the arguments say so.

    Raises:
        CaptureError: `model` is not a module that can be captured, or does not take these arguments.
    """
    check_model(model)
    _check_tensors(model)
    register_structures([*args, *kwargs.values()])
    form, inputs = bind_call(model, args, kwargs)
    if is_pretrained(model):
        choice = no_cache(form, inputs) if without_cache else cache_choice(model, form)
        form = form.with_implied(**choice)
    if is_weightless(model):
        inputs = with_values(inputs, device_for(model, inputs))
    return Call(form, distinct_tensors(inputs, [*model.parameters(), *model.buffers()]))


def capture_call(model: nn.Module, call: Call, dynamic_shapes: Any, *, compare: bool) -> CapturedModule:
    """Capture a model by one of its calls; see `capture`."""
    if (note := training_note(model)) is not None:
        _LOGGER.warning("%s", note)
    with (
        # A model makes tensors with values, even if the caller has made meta the default device.
        torch.device("cpu") if torch.get_default_device().type == "meta" else nullcontext(),
        outside_inference_mode(),  # new examples of other sizes must be tensors that ``torch.export`` takes, too
        configurations_kept(model, call.form.fixed.values()),
        random_state_kept(model, call.inputs),
    ):
        if compare and not is_weightless(model):
            takes(model, call.form, call.inputs)  # so that what code caches outside of the model is no fake tensor
        return _captured(Request(model, call.form, call.inputs, dynamic_shapes), compare=compare)


def _captured(request: Request, *, compare: bool) -> CapturedModule:
    """Capture with a cache if the model makes one that can be captured."""
    model, form = request.model, request.form
    if not pretrained_models(model):
        if any(isinstance(module, nn.RNNBase) for module in model.modules()):
            request = replace(request, dimensions=(dynamic_dimensions_around, batch_dimension))
        return _capture_request(request, compare=compare)
    caches = frozenset(name for name, value in request.inputs.items() if is_cache(value))
    known = dynamic_dimensions if is_pretrained(model) else dynamic_dimensions_around
    dimensions: list[DimensionsOf] = [partial(known, caches=caches)]
    if any(is_sound(name, value) for name, value in request.inputs.items()):
        # The most general first: if the model fixes the length of sounds, the next export takes it as fixed.
        dimensions.insert(0, partial(known, caches=caches, sounds=True))
    if not is_pretrained(model):
        dimensions.append(batch_dimension)
    request = replace(request, dimensions=dimensions, preparations=preparations(model))
    try:
        return _capture_request(request, compare=compare)
    except CaptureError as error:
        if not _chooses_cache(form):
            raise
        # The former observer may have noted caches. The errors stay, so that known failures are recognised.
        without = replace(request, form=form.with_implied(use_cache=False), observer=Observer())
        captured = _capture_request(without, compare=compare)
        _LOGGER.warning(
            "the graph of %s makes no cache of keys and values (use_cache=False), as it cannot be captured with one: "
            "%s",
            type(model).__name__,
            error,
        )
        return captured


def _capture_request(request: Request, *, compare: bool) -> CapturedModule:
    model, form, inputs = request.model, request.form, request.inputs
    exported = export(request)
    if lost := request.observer.lost:
        raise CaptureError(
            f"{type(model).__name__} adds to `{lost[0]}` and does not return it, so that the graph would lose what it "
            f"adds; let the model return it, or capture it without `{lost[0]}`"
        )
    _check_steps(request, exported)
    if ignored := ignored_names(model, form, _unused(exported)):
        return _capture_without(request, exported, ignored, compare=compare)
    # Only now: a model's own containers may have been registered with torch's pytrees during the export.
    nestings = {name: nesting_of(value) for name, value in inputs.items()}
    binding = InputBinding(form, type(model).__name__, structures_of(exported.module.graph), nestings)
    captured = build_captured(model, exported, binding, request.observer.reads)
    if is_pretrained(model):
        keep_stored_names(captured, model)
        keep_attributes(captured, model)
        computed = computed_buffers(model, device_for(model, inputs)) if is_weightless(model) else {}
        for name, values in computed.items():
            owner, key = owner_of(captured, name)
            owner._buffers[key] = values
    if request.observer.returned:
        captured.register_forward_hook(CacheReturn(request.observer.returned), with_kwargs=True)
    if compare:
        # Always, unless the caller declines: patches during an export have made graphs that were wrong by 5 %,
        # and users skip a check that they have to ask for.
        _check_example(request, exported, captured)
        if is_pretrained(model) and not is_weightless(model):
            binding.form = replace(form, absent=absent_inputs(model, form, inputs))
    for note in filter(None, (exported.note, hidden_note(captured))):
        _LOGGER.warning("%s: %s", type(model).__name__, note)
    return captured


def _capture_without(request: Request, exported: Export, ignored: Sequence[str], *, compare: bool) -> CapturedModule:
    """Capture without inputs that the model ignores; the graph ignores them too."""
    name, names = type(request.model).__name__, ", ".join(f"`{name}`" for name in ignored)
    inputs = {name: value for name, value in request.inputs.items() if name not in ignored}
    form = request.form.ignoring(ignored)
    without = replace(request, form=form, inputs=inputs, observer=Observer(), errors=[])
    # Compared below, with the ignored inputs too, since the model is called with them.
    captured = _capture_request(without, compare=False)
    if compare:
        _check_example(request, exported, captured)
    _LOGGER.warning("%s: the graph ignores %s, as the model does", name, names)
    return captured


def _chooses_cache(form: CallForm) -> bool:
    """Return whether a model is called with a cache that the caller has not asked for."""
    return "use_cache" in form.implied and bool(form.fixed["use_cache"])


def _check_example(request: Request, exported: Export, captured: CapturedModule) -> None:
    """Refuse a graph that does not do the same on the example as the model, called as the caller has called it.

    A graph of a batch of one with a caller's `dynamic_shapes` may not be valid for one: it is compared on two.
    """
    model, form, inputs = request.model, request.form, request.inputs
    leaves = (*model.parameters(), *model.buffers(), *pytree.tree_leaves(dict(inputs)))
    if any(isinstance(leaf, torch.Tensor) and leaf.is_meta for leaf in leaves):
        return
    if _chooses_cache(form):
        form = form.without("use_cache")
    if not exported.guards.accepts(pytree.tree_leaves(dict(inputs))):
        inputs = exported.inputs
    name, remedy = type(model).__name__, "please report it; compare=False returns the graph anyway"
    values = "does not depend on the values of its inputs in a way that a graph cannot express"
    try:
        found = difference_in_call(model, form, captured, inputs)
    except GraphError as error:
        cause = error.__cause__ or error
        raise CaptureError(
            f"the graph of {name} cannot be called with the example: {type(cause).__name__}: {first_line(cause)}. If "
            f"the model {values}, {remedy}"
        ) from cause
    except Exception as error:  # whatever the model raises
        raise CaptureError(
            f"{name} itself cannot be called with the example: {described(error)}. Give an example that it takes"
        ) from error
    if found is not None:
        raise CaptureError(
            f"the graph of {name} does not compute what the model does on the example: {found}. If the model {values}, "
            f"{remedy}"
        )
    compare_other_forms(model, form, captured, exported.inputs, request.observer.reads)


def _unused(exported: Export) -> list[str]:
    """Return the names of inputs that nothing in an exported graph reads."""
    placeholders = [node for node in iter_nodes(exported.module.graph) if node.op == "placeholder"]
    names = [str(getattr(path[0], "key", path[0])) for path, _ in pytree.tree_leaves_with_path(dict(exported.inputs))]
    used = {name for name, node in zip(names, placeholders, strict=True) if node.users}
    # The model has read the values of these, in place of which the graph has numbers.
    used |= {spec.name for spec in exported.guards.specs if spec.kind and spec.value is not None}
    return [name for name in dict.fromkeys(names) if name not in used]


def _check_steps(request: Request, exported: Export) -> None:
    """Refuse a model whose outputs depend on an attribute that calls change: in the graph it is a constant."""
    model, steps = request.model, request.observer.stepped
    if is_weightless(model):  # numbers alone: no second call shows that a table that it keeps changes nothing
        steps = {key: pair for key, pair in steps.items() if type(pair[0]) is type(pair[1]) in (bool, int, float, str)}
    if not steps:
        return
    try:
        change = None if is_weightless(model) else difference_of_calls(model, request.form, exported.inputs)
    except Exception as error:  # whatever the model raises
        change = f"it raises {type(error).__name__}: {error}"
    if change is not None or is_weightless(model):
        changes = ", ".join(f"`{name}` from {_shown(old)} to {_shown(new)}" for name, (old, new) in steps.items())
        raise CaptureError(
            f"{type(model).__name__} cannot be captured: a call of it changes {changes}, and in the next call "
            f"{change or 'of a model on the meta device, other outputs would go unnoticed'}. The graph would compute "
            f"the same every time; let the model keep that in a buffer, and change the buffer in place"
        )


def _shown(value: object) -> str:
    return f"{value!r:.40}" if isinstance(value, list | int | float | str | None) else type_text(value)


def _check_tensors(model: nn.Module) -> None:
    """Refuse tensors that ``torch.export`` does not take."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if type(tensor).__name__ == "DTensor":
            text = f"`{name}` of {type(model).__name__} is a DTensor, which cannot be captured; {_BEFORE_SHARDING}"
            raise CaptureError(text)
        if isinstance(tensor, nn.Parameter) and tensor.is_inference():
            raise CaptureError(
                f"`{name}` of {type(model).__name__} was made under torch.inference_mode(), and torch cannot export "
                f"such a tensor; capture copy.deepcopy(model), made outside of that mode"
            )


def check_model(model: object) -> None:
    """Raise a `CaptureError` that says what to give instead, unless this is a module that can be captured."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"{type_text(model)} cannot be captured; give a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"{model.original_name} is a TorchScript module, whose Python source is gone; capture the module that it "
            f"was scripted or traced from"
        )
    if hasattr(model, "_orig_mod"):
        raise CaptureError("this is a module that torch.compile returned; capture the module that was compiled")
    for path, module in model.named_modules():
        name = f"`{path}` of {type(model).__name__}" if path else type(model).__name__
        for kind in (cls.__name__ for cls in type(module).__mro__ if cls.__name__ in _DISTRIBUTED):
            # Before anything runs its hooks: FSDP's first call prepares the model for good.
            raise CaptureError(f"{name} is a {kind}, which cannot be captured; {_BEFORE_SHARDING}")
        if module._backward_hooks or module._backward_pre_hooks:
            raise CaptureError(
                f"{name} has backward hooks, which do not run where a graph has operators in place of the module; "
                f"remove them, and register them on the graph module"
            )
    for name in (*model._modules, *model._parameters, *model._buffers):
        # A captured module can be captured again, although it has a module of a reserved name.
        is_former_guard = isinstance(model._modules.get(name), InputGuards)
        if (hasattr(CapturedModule, name) or name in _RESERVED) and not is_former_guard:
            raise CaptureError(
                f"{type(model).__name__}.{name} has a name that a torch.fx.GraphModule uses itself; rename it"
            )


def build_captured(
    model: nn.Module, exported: Export, binding: InputBinding, reads: Mapping[str, str]
) -> CapturedModule:
    """Make the captured module of an export; `reads` are those of its `Observer`."""
    graph, source = exported.module.graph, exported.module
    return_plain_containers(graph)
    tidy(graph, source)
    # Before layers are raised: in the model, the name of a constant must not lead to another tensor.
    constants = _name_constants(graph, source, model)
    layers = raise_layers(graph, model)
    place_attributes(graph)
    _place_guards(graph)
    name_inputs(graph)
    separate_names(graph)
    shell = shell_tree(model, layers)
    shell._modules.pop(GUARDS, None)  # of a module that was captured before; the new ones include them
    for name, value in constants.items():
        _attach(shell, name, value)
    guards = with_dtypes(exported.guards, exported.values, reads, graph, model)
    captured = assemble(shell, graph, guards, binding)
    graph.lint()
    release_real_tensors(graph)
    return captured


def _place_guards(graph: Graph) -> None:
    """Put the placeholders first, followed by the call of the guards."""
    placeholders = [node for node in iter_nodes(graph) if node.op == "placeholder"]
    first = next(node for node in iter_nodes(graph) if node.op != "placeholder")
    for node in placeholders:
        first.prepend(node)
    with graph.inserting_before(first):
        # Before all other calls, so that no input is written to before it has been checked.
        graph.create_node("call_module", GUARDS, tuple(placeholders))


def _name_constants(graph: Graph, source: nn.Module, model: nn.Module) -> dict[str, object]:
    """Return the values that the graph reads and the model has not registered, under names free in the model."""
    taken = {*model._modules, *model._parameters, *model._buffers}
    names: dict[str, str] = {}
    constants: dict[str, object] = {}
    for node in iter_nodes(graph):
        if node.op not in ("get_attr", "call_module") or not node.users:
            continue
        target = str(node.target)
        value = attribute(source, target)
        if isinstance(value, torch.Tensor) and registered(model, target) is value:
            continue
        if target not in names:
            names[target] = free_name(target.replace(".", "_"), taken)
            taken.add(names[target])
            constants[names[target]] = value
        node.target = names[target]
    return constants


def _attach(shell: nn.Module, name: str, value: object) -> None:
    if isinstance(value, nn.Module):
        shell._modules[name] = value
    elif isinstance(value, torch.Tensor):
        with torch.inference_mode(False):  # whatever mode it was made in, autograd takes the constant
            value = value.clone() if value.is_inference() else value
        shell.register_buffer(name, value, persistent=False)
    else:
        raise CaptureError(f"the graph reads `{name}`, {type_text(value)} that no module of the graph can hold")
