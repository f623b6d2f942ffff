"""A digest of an exported program, to tell whether what fxopt keeps in an archive belongs to the program beside it.

It covers the operators with their arguments, and the inputs, outputs and tensors with their shapes, but neither names
of nodes, which torch's reader may choose anew, nor values of parameters, which may be trained on.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule, Node

from fxopt_capture.graph.layers import call_arguments
from fxopt_core.graph import iter_nodes
from fxopt_rewrite.plain_names import plain_name


def program_digest(program: ExportedProgram) -> str:
    """Return the digest of a program, the same before it is saved and after it was loaded."""
    digest = hashlib.sha256()
    for line in (*_signature(program), *_state(program), *_lines(program.graph, program.graph_module)):
        digest.update(line.encode() + b"\n")
    return digest.hexdigest()


def _signature(program: ExportedProgram) -> Iterator[str]:
    for given in program.graph_signature.input_specs:
        yield f"input {given.kind.name} {given.target} {given.persistent}"
    for made in program.graph_signature.output_specs:
        yield f"output {made.kind.name} {made.target}"


def _state(program: ExportedProgram) -> Iterator[str]:
    tensors: Mapping[str, Any] = {**program.state_dict, **program.constants}
    for name in sorted(tensors):
        tensor = tensors[name]
        described = f"{tuple(tensor.shape)} {tensor.dtype}" if isinstance(tensor, torch.Tensor) else "object"
        yield f"tensor {name} {described}"


def _lines(graph: Graph, root: GraphModule) -> Iterator[str]:
    """Yield one line per node; nodes of regions that are graphs themselves come where these are read."""
    positions: dict[Node, int] = {}
    for node in iter_nodes(graph):
        positions[node] = len(positions)
        region = getattr(root, str(node.target), None) if node.op == "get_attr" else None
        if isinstance(region, GraphModule):
            yield from _lines(region.graph, region)
        yield f"{node.op} {_called(node)} {_texts(_arguments(node), positions)}"


def _called(node: Node) -> str:
    return f"{plain_name(node.target) or node.target}" if node.op == "call_function" else ""


def _arguments(node: Node) -> Iterable[object]:
    """Return the arguments of a call, with the defaults, which torch's writer may put in or leave out."""
    if isinstance(node.target, OpOverload):
        return [item for pair in sorted(call_arguments(node.target, node.args, node.kwargs).items()) for item in pair]
    return (*node.args, *(item for pair in sorted(node.kwargs.items()) for item in pair))


def _texts(values: Iterable[object], positions: Mapping[Node, int]) -> str:
    return " ".join(_text(value, positions) for value in values)


def _text(value: object, positions: Mapping[Node, int]) -> str:
    if isinstance(value, Node):
        return f"%{positions[value]}"
    if isinstance(value, list | tuple):
        return f"[{_texts(value, positions)}]"
    if isinstance(value, bool | int | float | str | None):
        return repr(value)
    return str(value)
