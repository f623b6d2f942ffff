"""Capture a model as a graph module that reads like the model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.utils import _pytree as pytree

from fxopt_core.errors import CaptureError
from fxopt_core.graph import iter_nodes

from . import huggingface
from .arguments import CallForm, InputBinding, bind_call
from .assertions import with_asserted_dtypes
from .captured import GUARDS, CapturedModule, assemble
from .dynamic import batch_dimension
from .guards import InputGuards
from .nesting import nesting_of
from .raising import raise_layers
from .shells import attribute, shell_tree
from .strategy import Export, Request, export
from .structures import dataclasses_of, register_dataclasses
from .tidying import place_attributes, tidy

_RESERVED = frozenset({"meta", GUARDS})  # attributes that a graph module's instances have, besides those of its class


def capture(
    model: nn.Module,
    args: Sequence[object] | torch.Tensor = (),
    kwargs: Mapping[str, object] | None = None,
    *,
    dynamic_shapes: Any = None,
) -> GraphModule:
    """Capture a model as a graph module whose layers, names and ``state_dict`` keys are the model's.

    The graph comes from ``torch.export``, which runs the model on tensors without values. Calls of linear, convolution,
    normalization and embedding layers are calls of modules in it, which share parameters and buffers with the model and
    nothing else; the model is not changed. The result takes its arguments and returns its outputs as the model does.
    Inputs for which the graph is not valid are refused with a `CaptureError`: other sizes in static dimensions, sizes
    on which the model branches, arguments that were not given here, lists of another length and dictionaries with other
    keys. A batch of one as example does for other batches too; where the model distinguishes sizes of 0 or 1, model and
    graph are compared on slices of the example, and a size at which they differ is refused.

    Hugging Face decoders are captured without a cache of keys and values (``use_cache=False``), unless `kwargs` hold
    ``past_key_values`` or say otherwise, so that ``past_key_values`` is not among the outputs.

    Args:
        model: the model, in the mode (``train``, ``eval``) that the graph is to have.
        args: positional example arguments of its ``forward``, or one tensor.
        kwargs: keyword example arguments. Tensors, and containers with tensors, become inputs of the graph; all else is
            baked in.
        dynamic_shapes: which sizes may vary, as in ``torch.export.export``, by argument name. None: the first dimension
            of every tensor where the model allows it, and for Hugging Face models that of the sequence too.

    Returns:
        The graph module, in the model's mode.

    Raises:
        CaptureError: `model` is no module that can be captured, does not take these arguments, or does something that
            one graph cannot say; the message has the place in the model's source.

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
    return capture_call(model, read_call(model, positional, kwargs or {}), dynamic_shapes)


@dataclass(frozen=True)
class Call:
    """One call of a model.

    Attributes:
        form: how it is called.
        inputs: what it is called with, by name.
    """

    form: CallForm
    inputs: Mapping[str, object]


def read_call(model: nn.Module, args: Sequence[object], kwargs: Mapping[str, object]) -> Call:
    """Bind a call to the names of the model's ``forward``, with what a capture adds for Hugging Face models.

    Raises:
        CaptureError: `model` is no module that can be captured, or does not take these arguments.
    """
    check_model(model)
    register_dataclasses([*args, *kwargs.values()])
    form, inputs = bind_call(model, args, kwargs)
    if huggingface.is_pretrained(model):
        form = form.with_fixed(**huggingface.implied_arguments(form))
    return Call(form, pytree.tree_map_only(torch.Tensor, _ordinary, inputs))


def _ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor made in inference mode as one that autograd takes too."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone()


def capture_call(model: nn.Module, call: Call, dynamic_shapes: Any) -> CapturedModule:
    """Capture a model by one call of it; see `capture`."""
    dimensions_of, preparations = batch_dimension, Request.preparations
    if huggingface.is_pretrained(model):
        dimensions_of, preparations = huggingface.dynamic_dimensions, huggingface.preparations(model, call.inputs)
    exported = export(Request(model, call.form, call.inputs, dynamic_shapes, dimensions_of, preparations))
    # Only now: a model's own containers may be known to torch's pytrees only since the export.
    nestings = {name: nesting_of(value) for name, value in call.inputs.items()}
    binding = InputBinding(call.form, type(model).__name__, dataclasses_of(exported.module.graph), nestings)
    return build_captured(model, exported, binding)


def check_model(model: object) -> None:
    """Refuse what is no module that can be captured, with a `CaptureError` that says what to give instead."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"a {type(model).__name__} cannot be captured; give a torch.nn.Module")
    if isinstance(model, torch.jit.ScriptModule):
        raise CaptureError(
            f"{model.original_name} is a TorchScript module, whose Python source is gone; capture the module that it "
            f"was scripted or traced from"
        )
    if hasattr(model, "_orig_mod"):
        raise CaptureError("this is a module that torch.compile returned; capture the module that was compiled")
    for name in (*model._modules, *model._parameters, *model._buffers):
        is_former_guard = isinstance(model._modules.get(name), InputGuards)
        if (hasattr(CapturedModule, name) or name in _RESERVED) and not is_former_guard:
            raise CaptureError(
                f"{type(model).__name__}.{name} has a name that a torch.fx.GraphModule uses itself; rename it"
            )


def build_captured(model: nn.Module, exported: Export, binding: InputBinding) -> CapturedModule:
    """Make the captured module of an export."""
    graph, source = exported.module.graph, exported.module
    tidy(graph, source)
    constants = _name_constants(graph, source, model)
    layers = raise_layers(graph, model)
    place_attributes(graph)
    _place_guards(graph)
    shell = shell_tree(model, layers)
    shell._modules.pop(GUARDS, None)  # of a module that was captured before; the new ones include them
    for name, value in constants.items():
        _attach(shell, name, value)
    captured = assemble(shell, graph, with_asserted_dtypes(exported.guards, graph), binding)
    graph.lint()
    return captured


def _place_guards(graph: Graph) -> None:
    """Put the placeholders first, and the call of the guards behind them."""
    placeholders = [node for node in iter_nodes(graph) if node.op == "placeholder"]
    first = next(node for node in iter_nodes(graph) if node.op != "placeholder")
    for node in placeholders:
        first.prepend(node)
    with graph.inserting_after(placeholders[-1]):
        guards = graph.create_node("call_module", GUARDS, tuple(placeholders))
    stacks = (node.meta.get("nn_module_stack") for node in iter_nodes(graph))
    for root in (list(stack.items())[:1] for stack in stacks if stack):
        guards.meta["nn_module_stack"] = dict(root)
        return


def _name_constants(graph: Graph, source: nn.Module, model: nn.Module) -> dict[str, object]:
    """Return what the graph reads that is no parameter, buffer or module of the model, under names free in it."""
    taken = {name.split(".")[0] for name in (*dict(model.named_modules(remove_duplicate=False)), *model.state_dict())}
    names: dict[str, str] = {}
    constants: dict[str, object] = {}
    for node in iter_nodes(graph):
        if node.op not in ("get_attr", "call_module") or not node.users:
            continue
        target = str(node.target)
        value = attribute(source, target)
        if isinstance(value, torch.Tensor) and attribute(model, target) is value and _registered(model, target):
            continue
        if target not in names:
            names[target] = _free(target.replace(".", "_"), taken)
            constants[names[target]] = value
        node.target = names[target]
    return constants


def _registered(model: nn.Module, target: str) -> bool:
    path, _, name = target.rpartition(".")
    owner = model.get_submodule(path)
    return name in owner._parameters or name in owner._buffers


def _free(name: str, taken: set[str]) -> str:
    free, suffix = name, 0
    while free in taken:
        suffix += 1
        free = f"{name}_{suffix}"
    taken.add(free)
    return free


def _attach(shell: nn.Module, name: str, value: object) -> None:
    if isinstance(value, nn.Module):
        shell._modules[name] = value
    elif isinstance(value, torch.Tensor):
        shell.register_buffer(name, value, persistent=False)
    else:
        raise CaptureError(f"the graph reads `{name}`, a {type(value).__name__} that no module of the graph can hold")
