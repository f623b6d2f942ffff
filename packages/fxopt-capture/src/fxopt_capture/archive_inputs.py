"""The inputs of a program: read off an archive, and how a graph module that was loaded takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from fxopt_core.errors import CaptureError
from fxopt_core.graph import iter_nodes

from .archive_conditions import check_conditions
from .arguments import CallForm, InputBinding, Parameter
from .conditions import read_guards
from .guards import InputGuards
from .nesting import Nesting


@dataclass(frozen=True)
class ProgramInputs:
    """The inputs of an exported program.

    Attributes:
        module: the program as a graph module without guards.
        places: per input by name, in the graph's order, the numbers of its leaves in the containers that it has.
        positional: how many of them are given by position.
        values: what the placeholders hold in ``meta["val"]``, in order.
    """

    module: GraphModule
    places: Mapping[str, Any]
    positional: int
    values: Sequence[object]

    @property
    def constants(self) -> dict[str, object]:
        """The inputs that the program takes with one value only, by name; the graph does not depend on them."""
        found = {}
        for name, places in self.places.items():
            held = pytree.tree_map(lambda place: self.values[place], places)
            if not any(isinstance(leaf, torch.Tensor | torch.SymInt) for leaf in pytree.tree_leaves(held)):
                found[name] = held
        return found

    def code_generator(self) -> _PyTreeCodeGen:
        """Return what generates a ``forward`` that takes the inputs by name."""
        spec = pytree.tree_structure(((), dict(self.places)))
        return _PyTreeCodeGen(_PyTreeInfo(list(self.places), spec, _outputs(self.module)))

    def guards(self, program: ExportedProgram, mode: bool | None) -> InputGuards:
        """Return the check of the inputs.

        Raises:
            CaptureError: the program demands something that is no comparison of sizes, or takes numbers that vary.
        """
        varying = [name for name, places in self.places.items() if _varies(places, self.values)]
        if varying:
            raise CaptureError(
                f"input `{varying[0]}` of the program is a number that varies, and graphs of fxopt take tensors; "
                f"export the model with a tensor, or with one value of `{varying[0]}`"
            )
        guards = read_guards(program, self.places, self.values, mode)
        check_conditions(guards.conditions)
        return guards


def _varies(places: Any, values: Sequence[object]) -> bool:
    return any(isinstance(values[place], torch.SymInt | torch.SymFloat) for place in pytree.tree_leaves(places))


def _outputs(module: GraphModule) -> pytree.TreeSpec:
    codegen = module.graph._codegen
    if not isinstance(codegen, _PyTreeCodeGen) or codegen.pytree_info.out_spec is None:
        raise CaptureError("the program does not say how its outputs are structured")
    return codegen.pytree_info.out_spec


def read_inputs(program: ExportedProgram) -> ProgramInputs:
    """Return the inputs of a program, which were given by position or by name when it was exported.

    Raises:
        CaptureError: the program does not say what its inputs are.
    """
    module = program.module(check_guards=False)
    if not isinstance(module, GraphModule):
        raise TypeError(f"torch.export unlifted the program to a {type(module).__name__}, not to a GraphModule")
    codegen = module.graph._codegen
    if not isinstance(codegen, _PyTreeCodeGen):
        raise CaptureError("the program does not say how its inputs are structured")
    info = codegen.pytree_info
    args, kwargs = pytree.tree_unflatten(list(range(info.in_spec.num_leaves)), info.in_spec)
    places = {**dict(zip(info.orig_args, args, strict=False)), **kwargs}
    if len(places) != len(args) + len(kwargs) or not all(name.isidentifier() for name in places):
        raise CaptureError(f"the program names its inputs {list(info.orig_args)}, of which Python cannot take each")
    values = [node.meta.get("val") for node in iter_nodes(module.graph) if node.op == "placeholder"]
    return ProgramInputs(module, places, len(args), values)


def program_form(inputs: ProgramInputs) -> CallForm:
    """Return how a program is called: those given by position by name too; constants need not be repeated."""
    parameters = tuple(
        Parameter(name, positional=index < inputs.positional, keyword=True, required=True)
        for index, name in enumerate(inputs.places)
    )
    constants = inputs.constants
    names = tuple(name for name in inputs.places if name not in constants)
    return CallForm(parameters, names, constants, frozenset(constants))


class ArchivedBinding(InputBinding):
    """The binding of a graph that has placeholders for constants: a call need not give those.

    Args:
        form: how the program is called; its constants are among those baked in.
        model_name: the model's class, for messages.
        structures: the dataclasses that inputs and outputs consist of.
        nestings: how the containers of each input nest, by name.
        names: all inputs of the graph, in order.
    """

    def __init__(
        self,
        form: CallForm,
        model_name: str,
        structures: tuple[type, ...],
        nestings: Mapping[str, Nesting],
        names: Sequence[str],
    ) -> None:
        super().__init__(form, model_name, structures, nestings)
        self.names = tuple(names)

    def __call__(
        self, module: object, args: tuple[object, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[object, ...], dict[str, Any]]:
        """Return the call with every argument by name, in the graph's order.

        Raises:
            CaptureError: see `InputBinding`.
        """
        _, inputs = super().__call__(module, args, kwargs)
        return (), {name: inputs[name] if name in inputs else self.form.fixed[name] for name in self.names}


@dataclass(frozen=True)
class GuardedCall:
    """A forward pre-hook that checks the inputs of a graph which does not call its guards itself."""

    guards: InputGuards

    def __call__(self, module: object, args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
        """Check the inputs.

        Raises:
            CaptureError: the graph is not valid for them.
        """
        self.guards(*pytree.tree_leaves((args, dict(kwargs))))
