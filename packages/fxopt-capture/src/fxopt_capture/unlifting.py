"""The graph of an exported program with parameters, buffers and constants as attributes instead of inputs.

``ExportedProgram.module()`` does this too, by way of copies and generated code that a capture throws away at once. That
takes up to an eighth of the time of the export itself.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind, InputSpec, OutputKind
from torch.fx import Graph, GraphModule, Interpreter, Node
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from fxopt_core.graph import iter_nodes

_ATTRIBUTES = frozenset({InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR})


class Unlifted(nn.Module):
    """A graph with the modules and tensors that it reads, which runs node by node, without code of its own.

    Args:
        graph: takes its inputs by name, in the order in which a call gives them.
    """

    def __init__(self, graph: Graph) -> None:
        super().__init__()
        self.graph = graph
        graph.owning_module = None

    def forward(self, **inputs: object) -> object:
        """Compute the outputs."""
        return Interpreter(self, graph=self.graph).run(*inputs.values())


def unlifted(program: ExportedProgram) -> Unlifted | GraphModule:
    """Return a program's graph as a module, which shares its tensors and checks nothing.

    Args:
        program: exported with inputs by name alone; its graph is used up.
    """
    specification = program.call_spec.in_spec
    if specification is None or not _is_plain(program, specification):
        return _by_torch(program)
    graph, root = program.graph, Unlifted(program.graph)
    _reserve_names(graph)
    root._modules.update(program.graph_module._modules)
    for node, spec in zip(list(_placeholders(graph)), program.graph_signature.input_specs, strict=True):
        if spec.kind in _ATTRIBUTES:
            _attach(root, str(spec.target), _value(program, spec), spec)
            _read_instead(graph, node, str(spec.target))
    names = list(specification.child(1).context)
    graph.set_codegen(_PyTreeCodeGen(_PyTreeInfo(names, specification, program.call_spec.out_spec)))
    return root


def _by_torch(program: ExportedProgram) -> GraphModule:
    module = program.module(check_guards=False)
    if not isinstance(module, GraphModule):
        raise TypeError(f"torch.export unlifted the model to a {type(module).__name__}, not to a GraphModule")
    return module


def _is_plain(program: ExportedProgram, specification: pytree.TreeSpec) -> bool:
    """Whether a program writes nothing by way of its outputs, and has inputs by name and tensors as state alone."""
    signature = program.graph_signature
    return (
        specification.child(0).num_children == 0
        and all(spec.kind is OutputKind.USER_OUTPUT for spec in signature.output_specs)
        and all(spec.kind in _ATTRIBUTES | {InputKind.USER_INPUT} for spec in signature.input_specs)
        and not any(
            _value(program, spec).requires_grad
            for spec in signature.input_specs
            if spec.kind is InputKind.CONSTANT_TENSOR
        )
        and all(
            isinstance(getattr(program.graph_module, str(node.target), None), nn.Module)
            for node in iter_nodes(program.graph)
            if node.op == "get_attr"
        )
    )


def _reserve_names(graph: Graph) -> None:
    """Let new nodes have other names than those that are there: the export has renamed inputs behind its back."""
    graph._graph_namespace._used_names.update(node.name for node in iter_nodes(graph))


def _placeholders(graph: Graph) -> Iterator[Node]:
    return (node for node in iter_nodes(graph) if node.op == "placeholder")


def _value(program: ExportedProgram, spec: InputSpec) -> torch.Tensor:
    name = str(spec.target)
    value: torch.Tensor = program.state_dict[name] if name in program.state_dict else program.constants[name]
    return value


def _attach(root: nn.Module, name: str, value: torch.Tensor, spec: InputSpec) -> None:
    """Register a tensor under a dotted name, in containers that are made where they are missing."""
    *path, last = name.split(".")
    owner = root
    for part in path:
        if part not in owner._modules:
            owner._modules[part] = nn.Module()
        owner = owner.get_submodule(part)
    if spec.kind is InputKind.CONSTANT_TENSOR:
        setattr(owner, last, value)
    elif isinstance(value, nn.Parameter):
        owner._parameters[last] = value
    else:
        owner.register_buffer(last, value, persistent=bool(spec.persistent))


def _read_instead(graph: Graph, placeholder: Node, name: str) -> None:
    """Read an attribute in place of an input; not at all where nothing reads the input."""
    if not placeholder.users:
        graph.erase_node(placeholder)
        return
    placeholder.op, placeholder.target, placeholder.args = "get_attr", name, ()
    placeholder._rename(name)
