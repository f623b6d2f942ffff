"""The inputs of a program: read off an archive, and how a graph module that was loaded takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch.export import ExportedProgram
from torch.fx import GraphModule
from torch.fx.graph import _PyTreeCodeGen, _PyTreeInfo
from torch.utils import _pytree as pytree

from fxopt_core.errors import CaptureError
from fxopt_core.graph import iter_nodes

from .archive_conditions import check_conditions, normal_form
from .archive_values import Json, from_json, to_json
from .arguments import CallForm, InputBinding, Parameter
from .conditions import read_guards
from .guards import Condition, InputGuards, InputSpec
from .nesting import Nesting
from .structures import return_sizes


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

    def code_generator(self) -> _PyTreeCodeGen:
        """Return what generates a ``forward`` that takes the inputs by name."""
        spec = pytree.tree_structure(((), dict(self.examples)))
        return _PyTreeCodeGen(_PyTreeInfo(list(self.examples), spec, _outputs(self.module)))

    def guards(self, program: ExportedProgram, mode: bool | None) -> InputGuards:
        """Return the check of the inputs.

        Raises:
            CaptureError: the program demands something that is no comparison of sizes, or takes numbers that vary.
        """
        varying = [name for name, example in self.examples.items() if _holds(example, torch.SymInt | torch.SymFloat)]
        if varying:
            raise CaptureError(
                f"input `{varying[0]}` of the program is a number that varies, and graphs of fxopt take tensors; "
                f"export the model with a tensor, or with one value of `{varying[0]}`"
            )
        guards = read_guards(program, self.examples, self.values, mode)
        check_conditions(guards.conditions)
        return guards


def _holds(example: object, kinds: Any) -> bool:
    return any(isinstance(leaf, kinds) for leaf in pytree.tree_leaves(example))


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
    return_sizes(module.graph)
    info = codegen.pytree_info
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


_READ_OFF_THE_PROGRAM = frozenset({"name", "kind", "sizes", "value"})
_KEPT = tuple(field.name for field in fields(InputSpec) if field.name not in _READ_OFF_THE_PROGRAM)


def guards_row(guards: object, *, complete: bool) -> Json:
    """Return what guards demand: dtypes, which a program does not say, and sizes, which it may say in other words.

    Args:
        guards: those of the graph module that is saved; None where it has none.
        complete: whether the program is to demand no more than they do. An export may find further conditions, which
            are those of the program and not of the graph.
    """
    if not isinstance(guards, InputGuards):
        return None
    specs = [{name: to_json(getattr(spec, name)) for name in _KEPT} for spec in guards.specs]
    conditions = [[condition.code, condition.text] for condition in guards.conditions]
    kept = {"specs": specs, "conditions": conditions, "module_dtype": to_json(guards.module_dtype)}
    return {**kept, "complete": complete}


def with_row(guards: InputGuards, row: Json) -> InputGuards:
    """Return the guards of a program that demand what `guards_row` has written, and that alone if that is complete.

    Raises:
        ValueError: it was written for other inputs.
    """
    if row is None:
        return guards
    specs = [
        replace(spec, **{name: from_json(kept[name]) for name in _KEPT})
        for spec, kept in zip(guards.specs, row["specs"], strict=True)
    ]
    conditions = [Condition(str(code), str(text)) for code, text in row["conditions"]]
    check_conditions(conditions)
    if not row.get("complete"):
        known = {normal_form(condition.code) for condition in conditions}
        conditions += [condition for condition in guards.conditions if normal_form(condition.code) not in known]
    return InputGuards(specs, conditions, guards.mode, from_json(row["module_dtype"]))
