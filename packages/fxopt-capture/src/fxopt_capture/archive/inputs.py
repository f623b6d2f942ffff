"""The inputs of a program: read off an archive, and how a graph module that was loaded takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule
from torch.utils import _pytree as pytree

from fxopt_capture._torch import graph_module_of, pytree_info, set_pytree_info
from fxopt_capture.call.arguments import CallForm, Parameter
from fxopt_capture.call.guards import InputGuards
from fxopt_capture.call.structures import return_sizes
from fxopt_capture.exporting.conditions import read_guards
from fxopt_core.errors import CaptureError
from fxopt_core.graph import iter_nodes


@dataclass(frozen=True)
class ProgramInputs:
    """The inputs of an exported program.

    Attributes:
        module: the program as a graph module without guards.
        examples: per input by name, in the graph's order, what the placeholders hold, in the containers that it has.
        positional: how many of them are given by position.
        values: what the placeholders hold in ``meta["val"]``, in order.
    """

    module: GraphModule
    examples: Mapping[str, Any]
    positional: int
    values: Sequence[object]

    @property
    def constants(self) -> dict[str, object]:
        """The inputs that the program takes with one value only, by name; the graph does not depend on them."""
        return {name: example for name, example in self.examples.items() if not _holds(example, torch.Tensor)}

    def name(self, graph: Graph) -> None:
        """Let a graph take the inputs by name."""
        spec = pytree.tree_structure(((), dict(self.examples)))
        info = pytree_info(self.module.graph)
        set_pytree_info(graph, list(self.examples), spec, None if info is None else info.out_spec)

    def guards(self, program: ExportedProgram, mode: bool | None) -> InputGuards:
        """Return the check of the inputs."""
        varying = [name for name, example in self.examples.items() if _holds(example, torch.SymInt | torch.SymFloat)]
        if varying:
            raise CaptureError(
                f"input `{varying[0]}` of the program is a number that varies, and graphs of fxopt take tensors; "
                f"export the model with a tensor, or with one value of `{varying[0]}`"
            )
        return read_guards(program, self.examples, self.values, mode)


def _holds(example: object, kinds: Any) -> bool:
    return any(isinstance(leaf, kinds) for leaf in pytree.tree_leaves(example))


def read_inputs(program: ExportedProgram) -> ProgramInputs:
    """Return the inputs of a program, which were given by position or by name when it was exported."""
    module = graph_module_of(program)
    return_sizes(module.graph)
    info = pytree_info(module.graph)
    if info is None:
        raise CaptureError("the program does not say how its inputs are structured")
    values = [node.meta.get("val") for node in iter_nodes(module.graph) if node.op == "placeholder"]
    args, kwargs = pytree.tree_unflatten(values, info.in_spec)
    examples = {**dict(zip(info.orig_args, args, strict=False)), **kwargs}
    if len(examples) != len(args) + len(kwargs) or not all(name.isidentifier() for name in examples):
        raise CaptureError(f"the program names its inputs {list(info.orig_args)}, of which Python cannot take each")
    return ProgramInputs(module, examples, len(args), values)


def program_form(inputs: ProgramInputs) -> CallForm:
    """Return how a program is called: those given by position by name too; constants need not be repeated."""
    parameters = tuple(
        Parameter(name, positional=index < inputs.positional, keyword=True, required=True)
        for index, name in enumerate(inputs.examples)
    )
    constants = inputs.constants
    names = tuple(name for name in inputs.examples if name not in constants)
    return CallForm(parameters, names, constants, frozenset(constants))
