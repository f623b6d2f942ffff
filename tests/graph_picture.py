"""A picture of a graph module in plain data and tensors, to compare bit for bit; and a reader in another process.

`python graph_picture.py TASKS` is that process: it loads graph modules, does to each what its task says, and writes
down what it sees.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxopt_core import Composition, FxoptError, Transformation, history, iter_nodes, name_of, registry, undo

Picture = dict[str, Any]
META = ("stack_trace", "nn_module_stack", "note")


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
        "meta": [[str(node.meta.get(key)) for key in META] for node in iter_nodes(graph_module.graph)],
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


def outputs(graph_module: GraphModule, inputs: dict[str, Any]) -> list[Tensor]:
    """The tensors that a graph module returns."""
    with torch.no_grad():
        return [leaf for leaf in pytree.tree_leaves(graph_module(**inputs)) if isinstance(leaf, Tensor)]


@dataclass
class Task:
    """What the other process is to do with one graph module, and with what.

    Attributes:
        path: where the graph module is.
        pipeline: the passes that were applied to it.
        inputs: what to run it with.
    """

    path: str
    pipeline: str
    inputs: dict[str, Any]


def members(passes: Transformation) -> tuple[Transformation, ...]:
    """The passes of a pipeline."""
    return passes.transformations if isinstance(passes, Composition) else (passes,)


def report(task: Task) -> dict[str, Any]:
    """Load a graph module, see what its records say, undo it, and run it."""
    graph_module: GraphModule = torch.load(task.path, weights_only=False)
    passes = registry().pipeline(task.pipeline)
    seen: dict[str, Any] = {
        "before": picture(graph_module),
        "history": history(graph_module).to_json(),
        "marked": [[node.name for node in each.get_transformed_nodes(graph_module)] for each in members(passes)],
        "outputs before": outputs(graph_module, task.inputs),
    }
    torch.save(graph_module, f"{task.path}.again")
    try:
        undo(graph_module)
    except FxoptError as error:
        seen["refused"] = str(error)
    seen |= {"after": picture(graph_module), "outputs": outputs(graph_module, task.inputs)}
    again: GraphModule = torch.load(f"{task.path}.again", weights_only=False)
    try:
        passes(again, reverse=True)  # type: ignore[arg-type]  # or be refused
    except FxoptError as error:
        seen["reverse refused"] = str(error)
    return seen | {"after reverse": picture(again)}


def main() -> None:
    """Do the tasks that a file holds, and write what was seen beside it."""
    path = Path(sys.argv[1])
    tasks: list[Task] = [Task(**each) for each in torch.load(path, weights_only=False)]
    torch.save([report(task) for task in tasks], path.with_suffix(".seen"))


if __name__ == "__main__":
    main()
