"""A picture of a graph module in plain data and tensors, to compare bit for bit."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fxopt_core import iter_nodes, name_of

Picture = dict[str, Any]
META = ("stack_trace", "nn_module_stack", "note")


def named(value: object) -> str:
    """The text of a value with classes by their names, as pickles and archives keep them."""
    return re.sub(r"<class ('[\w.<>]+')>", r"\1", str(value))


def picture(graph_module: GraphModule) -> Picture:
    """All that undo promises to bring back: nodes in order, code, module tree, tensors with flags and ties."""
    tensors = [
        *graph_module.named_parameters(remove_duplicate=False),
        *graph_module.named_buffers(remove_duplicate=False),
    ]
    first: dict[int, str] = {}
    for name, tensor in tensors:
        first.setdefault(id(tensor), name)
    return {
        "nodes": [
            (
                n.name,
                n.op,
                name_of(n.target) or str(n.target),
                str(n.args),
                str(n.kwargs),
                list(map(str, n.users)),
                str(n.type),
            )
            for n in iter_nodes(graph_module.graph)
        ],
        "meta": [[named(node.meta.get(key)) for key in META] for node in iter_nodes(graph_module.graph)],
        "code": graph_module.code,
        "keys": list(graph_module.state_dict()),
        "modules": [
            (name, type(module).__name__, module.training)
            for name, module in graph_module.named_modules(remove_duplicate=False)
            if name
        ],
        "ties": {name: first[id(tensor)] for name, tensor in tensors},
        "flags": {name: (type(t).__name__, t.dtype, t.stride(), t.requires_grad) for name, t in tensors},
        "values": {name: tensor.detach().clone() for name, tensor in tensors},
    }


def difference(found: Picture, expected: Picture) -> list[str]:
    """What differs between two pictures, in words; nothing where they are the same, bit for bit."""
    plain = [key for key in expected if key != "values" and found[key] != expected[key]]
    told = [f"{key}: {found[key]} is not {expected[key]}" for key in plain]
    names = [name for name in expected["values"] if not same_bits(found["values"].get(name), expected["values"][name])]
    return [*told, *(f"values of {name}" for name in names)]


def same_bits(one: object, other: Tensor) -> bool:
    """Whether two tensors have the same bits, not-a-numbers and signs of zero included."""
    if not isinstance(one, Tensor) or (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    left, right = (tensor.detach().contiguous().view(-1).view(torch.uint8) for tensor in (one, other))
    return torch.equal(left, right)
