"""`Trial`: one run of a pass on one model, with the state before it; `Subject`: a pass with all of its trials."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn
from torch.fx import GraphModule

from fxopt_core import (
    Composition,
    Refusal,
    ReversibleTransformation,
    Transformation,
    faithful_copy,
    history,
    iter_nodes,
)
from fxopt_testing.cases import ModelCase
from fxopt_testing.examples import example_case
from fxopt_testing.forms import TRACED
from fxopt_testing.outcomes import Behaviour, Difference, behaviour_of, unlike
from fxopt_testing.pictures import bits_of, changes, modes_of_process, picture, state_of


class Trial:
    """A pass that has run once on a model.

    Attributes:
        transformation: the pass.
        case: the model.
        source: the graph module as it was before the run, a copy.
        result: the graph module after the run; None where the pass raised.
        error: what the pass raised, or None.
        touched: how the caller's model changed, a line each.
        process: how the state of the process changed, a line each.
    """

    def __init__(self, transformation: Transformation, case: ModelCase) -> None:
        self.transformation = transformation
        self.case = case
        model, graph_module = case.capture()
        self.source = faithful_copy(graph_module)
        self.before = picture(self.source)
        self.result: GraphModule | None = None
        self.error: Exception | None = None
        watched = nn.Module() if case.form == "graph" else model  # a graph module is no caller's
        former, modes = state_of(watched), modes_of_process()
        with process_kept():
            try:
                self.result = transformation(graph_module)
            except Exception as error:
                self.error = error
            # Before `process_kept` ends, which restores what the pass has left changed.
            left = changes(modes, modes_of_process(), limit=None)
        found = changes(former, state_of(watched), limit=None)
        texts = ([f"{what} is {now}, was {was}" for what, now, was in each] for each in (left, found))
        self.process, self.touched = texts
        # `capture` notices writes to tensors by itself, but neither new hooks nor other attributes.
        if self.touched:
            case.forget()
        self.after = picture(self.result) if isinstance(self.result, GraphModule) else {}

    @cached_property
    def changed(self) -> bool:
        """Whether the pass changed anything."""
        return self.before != self.after

    @property
    def done(self) -> GraphModule:
        """The result of a run that raised nothing."""
        assert self.result is not None
        return self.result

    @property
    def refusals(self) -> list[Refusal]:
        """The sites that the pass left alone; none where it raised."""
        records = history(self.result) if isinstance(self.result, GraphModule) else ()
        return [refusal for record in records for refusal in record.refusals]

    def fresh(self) -> GraphModule:
        """Return a copy of the graph module before the run, free to be changed."""
        return faithful_copy(self.source)

    def transformed(self) -> GraphModule:
        """Return a copy of the result, free to be changed."""
        return faithful_copy(self.done)

    @cached_property
    def size(self) -> int:
        """How many nodes the graph had."""
        return len(self.source.graph.nodes)

    @cached_property
    def expected(self) -> Behaviour:
        """What the model did before the run, with gradients where they are compared."""
        return behaviour_of(self.source, self.case.example(), gradients=self._has_gradients)

    @cached_property
    def found(self) -> Behaviour:
        """What it does after the run."""
        return behaviour_of(self.done, self.case.example(), gradients=self._has_gradients)

    @property
    def _has_gradients(self) -> bool:
        # In train mode, only outputs and effects are compared (`TRAIN_MODE`).
        return self.transformation.preserves_computation and not self.case.training

    @cached_property
    def differences(self) -> Sequence[Difference]:
        """How the result differs from the model before the run."""
        return unlike(self.source, self.done, self.case.example(), self.expected, self.found)

    @cached_property
    def survives_torch(self) -> bool:
        """Whether a copy that torch makes of the model computes the same: it drops some hooks."""
        return self.computes(copy.deepcopy(self.source), self.expected)

    def computes(self, graph_module: GraphModule, expected: Behaviour) -> bool:
        """Return whether a graph module gives the same outputs, bit for bit."""
        found = behaviour_of(graph_module, self.case.example(), gradients=False)
        mine, theirs = (bits_of(dict(each.outcome.output)) for each in (found, expected))
        return mine == theirs

    @cached_property
    def repeats(self) -> Sequence[tuple[str, Sequence[tuple[str, str, str]], Mapping[int, str]]]:
        """Further runs of the same pass and of an equal one: how each differs, and the memory that its result has."""
        passes = {"the same pass": self.transformation, "an equal pass": equal_pass(self.transformation)}
        results = {by: each(self.fresh()) for by, each in passes.items()}  # both alive, so that no address comes twice
        return [(by, changes(self.after, picture(made), limit=1), memory_of(made)) for by, made in results.items()]


def memory_of(graph_module: GraphModule) -> dict[int, str]:
    """Return the addresses of the memory of parameters and buffers, with a name for each."""
    tensors = (*graph_module.named_parameters(), *graph_module.named_buffers())
    # Other classes, such as uninitialised parameters, may have no memory; empty tensors all have address 0.
    plain = ((name, t) for name, t in tensors if type(t) in (torch.Tensor, nn.Parameter) and not t.is_meta)
    return {tensor.untyped_storage().data_ptr(): name for name, tensor in plain if tensor.numel()}


def hooks_of(graph_module: GraphModule) -> dict[str, int]:
    """Return how many hooks modules, parameters and buffers have, by name; those with none are left out."""
    found: dict[str, int] = {}
    for name, module in graph_module.named_modules(remove_duplicate=False):
        hooks = [value for key, value in vars(module).items() if key.endswith("_hooks")]
        found[f"module `{name}`"] = sum(len(value) for value in hooks if hasattr(value, "__len__"))
    for name, tensor in graph_module.named_parameters(remove_duplicate=False):
        found[f"parameter `{name}`"] = len(tensor._backward_hooks or ())
    found.pop("module ``")  # those of fxopt for copying are among its own
    return {name: count for name, count in found.items() if count}


def called_modules(graph_module: GraphModule) -> set[str]:
    """Return the targets of all calls of modules."""
    return {str(node.target) for node in iter_nodes(graph_module.graph) if node.op == "call_module"}


@dataclass(eq=False)
class Subject:
    """A pass, and the models that it is tried on; trials are made on first use and kept.

    Attributes:
        transformation: the pass.
        cases: the models.
        own: whether the caller gave the models.
        site_model: a model with sites for the pass, which is tried in several forms, dtypes and modes.
    """

    transformation: Transformation
    cases: tuple[ModelCase, ...]
    own: bool = False
    site_model: ModelCase | None = None

    @cached_property
    def trials(self) -> tuple[Trial, ...]:
        """One run on each model; where none has a site, also on that of the pass's example."""
        trials = [Trial(self.transformation, case) for case in self.cases]
        if self.site_model is not None:
            trials += _of_site_model(self.transformation, self.site_model)
        elif self.transformation._edits and not self.own and not any(trial.changed for trial in trials):
            example = example_case(type(self.transformation))
            trials += [] if example is None else [Trial(self.transformation, example)]
        self.cases = tuple(trial.case for trial in trials)
        return tuple(trials)

    @property
    def changed(self) -> list[Trial]:
        """The trials in which the pass raised nothing and changed something."""
        return [trial for trial in self.trials if trial.error is None and trial.changed]

    @property
    def name(self) -> str:
        """The pass as a call."""
        text = repr(self.transformation)
        return text if len(text) < 120 else self.transformation.name

    @property
    def reversible(self) -> ReversibleTransformation | None:
        """The pass, if it can be reversed."""
        found = self.transformation
        return found if isinstance(found, ReversibleTransformation) and found.reversible else None

    @property
    def importable(self) -> bool:
        """Whether another process, or a record, can find the class of the pass by its name."""
        cls = type(self.transformation)
        # "builtins" is the module of classes that `exec` makes where there is no `__name__`.
        return "<locals>" not in cls.__qualname__ and cls.__module__ not in ("__main__", "builtins")


def equal_pass(transformation: Transformation, **changed: object) -> Transformation:
    """Return another pass of the same class and options, except those that are given."""
    if isinstance(transformation, Composition):
        return copy.deepcopy(transformation)
    made = type(transformation)(**{**transformation.options, **changed})
    assert isinstance(made, Transformation)
    return made


def _of_site_model(transformation: Transformation, case: ModelCase) -> Iterator[Trial]:
    """Yield runs on a model, and on it in other forms, in bfloat16 and in the other mode, as far as they exist."""
    yield Trial(transformation, case)
    if case.form != "graph":
        variants: list[dict[str, object]] = [{"form": form} for form in (*TRACED, "export") if form != case.form]
        variants += [{"dtype": torch.bfloat16}, {"training": not case.training}]
        for changed in variants:
            with suppress(Exception):  # not every model can be traced or exported, and not in every dtype
                yield Trial(transformation, case.variant(**changed))


@contextmanager
def process_kept() -> Iterator[None]:
    """Bring grad mode, default dtype and random state back at the end, so that no check disturbs another."""
    dtype = torch.get_default_dtype()
    try:
        # No devices: the models of the kit are on the CPU, or on meta.
        with torch.random.fork_rng(devices=[]), torch.set_grad_enabled(torch.is_grad_enabled()):
            yield
    finally:
        torch.set_default_dtype(dtype)
