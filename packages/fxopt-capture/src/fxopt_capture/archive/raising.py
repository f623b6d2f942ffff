"""Make a captured module of the program of an archive, as `capture` makes one of a model."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.fx import GraphModule

from fxopt_capture.archive.inputs import ProgramInputs, program_form, read_inputs
from fxopt_capture.archive.layers import build_layers
from fxopt_capture.call.arguments import CallForm, InputBinding
from fxopt_capture.call.nesting import nesting_of
from fxopt_capture.call.structures import structures_of
from fxopt_capture.capture import build_captured
from fxopt_capture.captured import CapturedModule
from fxopt_capture.exporting.strategy import Export
from fxopt_capture.graph.layers import call_arguments
from fxopt_capture.graph.shells import owner_of, shell_tree
from fxopt_core.graph import iter_nodes


def raise_program(program: ExportedProgram) -> CapturedModule:
    """Return a program as a graph module whose layers are modules, with the keys that its state_dict has.

    Raises:
        CaptureError: something about its inputs is beyond a captured module.
    """
    inputs = read_inputs(program)
    source = inputs.module
    _hold_unread(source, program)
    tie(source)
    trains = _trains(source)
    stand_in = _stand_in(source, trains)
    inputs.name(source.graph)
    exported = Export(source, inputs.guards(program, trains), inputs.examples, inputs.values)
    return build_captured(stand_in, exported, binding_of(inputs, program_form(inputs), _name(source)), {})


def binding_of(inputs: ProgramInputs, form: CallForm, name: str) -> InputBinding:
    """Return what accepts the calls of a loaded module."""
    nestings = {key: nesting_of(value) for key, value in inputs.examples.items()}
    structures = structures_of(inputs.module.graph)
    names = None if set(inputs.examples) == set(form.inputs) else tuple(inputs.examples)
    return InputBinding(form, name, structures, nestings, names)


def _hold_unread(root: nn.Module, program: ExportedProgram) -> None:
    """Let a module hold the tensors of a program's ``state_dict`` that the program does not read: unused ones, ties."""
    known = root.state_dict(keep_vars=True)
    for key, tensor in program.state_dict.items():
        if key not in known:
            owner, local = owner_of(root, key)
            held: dict[str, Any] = owner._parameters if isinstance(tensor, nn.Parameter) else owner._buffers
            held[local] = tensor


def tie(root: nn.Module) -> None:
    """Make parameters and buffers that are the same memory in the same shape one object again."""
    seen: dict[object, torch.Tensor] = {}
    for module in root.modules():
        held: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
        for tensors in held:
            for name, tensor in tensors.items():
                if tensor is not None and tensor.layout == torch.strided and tensor.numel() and not tensor.is_meta:
                    layout = (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)
                    tensors[name] = seen.setdefault((tensor.data_ptr(), layout, type(tensor)), tensor)


def _stand_in(source: GraphModule, trains: bool) -> nn.Module:
    """Return a tree with the tensors of a program, whose layers are those that its calls tell of."""
    stand_in = shell_tree(source, ())
    for name, child in source._modules.items():
        if isinstance(child, GraphModule):
            del stand_in._modules[name]  # a region of the graph
    stand_in.train(trains)
    build_layers(source.graph, stand_in)
    return stand_in


def _trains(source: GraphModule) -> bool:
    """Whether any operator of a program trains: without one, a program is taken for one of evaluation mode."""
    for node in iter_nodes(source.graph):
        if isinstance(node.target, torch._ops.OpOverload):
            arguments = call_arguments(node.target, node.args, node.kwargs)
            running = arguments.get("running_mean", arguments)  # without statistics, evaluating is done as training
            if running is not None and (arguments.get("training") is True or arguments.get("train") is True):
                return True
    return False


def _name(source: GraphModule) -> str:
    """Return the name of the class that a program was exported from, as far as its operators know it."""
    for node in iter_nodes(source.graph):
        for _, cls in list((node.meta.get("nn_module_stack") or {}).values())[:1]:
            name = (cls.__qualname__ if isinstance(cls, type) else str(cls)).rpartition(".")[2]
            return name if name.isidentifier() else "ExportedProgram"
    return "ExportedProgram"
