"""`ModelCase`: a model, its inputs, and the form of graph in which a pass gets it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.fx import Graph, GraphModule

from fxopt_testing.forms import FORMS, Form, exported, traced
from fxopt_testing.pictures import tensors_of
from fxopt_tools import Inputs
from fxopt_tools.inputs import OneInput, read_inputs


class Captured(NamedTuple):
    """A caller's model, and the graph module made from it; tracing makes both share modules and tensors."""

    model: nn.Module
    graph_module: GraphModule


#: A model, what was made of it, and its tensors then: both are used again as long as nobody writes into the model.
_Known: TypeAlias = "tuple[nn.Module, ExportedProgram | Graph, dict[str, object]]"


@dataclass(frozen=True, eq=False)
class ModelCase:
    """One model to try passes on.

    Attributes:
        name: its name in reports.
        make: makes the model: a class, or a function without arguments. It is called with a fixed seed, so that it
            makes an equal model each time.
        inputs: what the model is called with: a tensor, a tuple of positional arguments, a dictionary of keyword
            arguments, or `fxopt_tools.Inputs`.
        others: further inputs that the model accepts.
        form: the form of graph; see `fxopt_testing.forms.Form`.
        dtype: the dtype of parameters and of floating-point inputs.
        training: whether the model is in train mode.
        device: "cpu", or "meta", where nothing is computed.
        batched: whether the first dimension of all input tensors is a batch of any size, so that other sizes, the
            empty batch included, are tried too.

    >>> from fxopt_core import iter_nodes
    >>> case = ModelCase("one layer", lambda: nn.Linear(4, 2), torch.ones(3, 4))
    >>> case.id, [node.name for node in iter_nodes(case.capture().graph_module.graph)]
    ('one layer[modules]', ['input_1', 'weight', 'bias', 'linear', 'output'])
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: OneInput
    others: Sequence[OneInput] = ()
    form: Form = "modules"
    dtype: torch.dtype = torch.float32
    training: bool = False
    device: str = "cpu"
    batched: bool = True
    _known: list[_Known] = field(default_factory=list, init=False, repr=False)  # what was captured, at most one

    def __post_init__(self) -> None:
        if self.form not in FORMS:
            raise ValueError(f"case {self.name!r} has form {self.form!r}, expected one of {', '.join(FORMS)}")
        if isinstance(self.make, nn.Module):
            raise TypeError(
                f"case {self.name!r} is given a model; expected a function that makes one, since each check needs a "
                "model of its own: lambda: MyModel()"
            )

    @property
    def id(self) -> str:
        """Name, form, and what is unusual about it: ``attention[export-bfloat16-train]``."""
        parts: list[str] = [self.form]
        if self.dtype is not torch.float32:
            parts.append(str(self.dtype).removeprefix("torch."))
        parts += ["train"] * self.training + ["meta"] * (self.device == "meta")
        return f"{self.name}[{'-'.join(parts)}]"

    def variant(self, **changes: Any) -> ModelCase:
        """Return the same model in another form, dtype or mode.

        >>> ModelCase("relu", nn.ReLU, torch.ones(3, 4)).variant(form="export", training=True).id
        'relu[export-train]'
        """
        return replace(self, **changes)

    def model(self) -> nn.Module:
        """Return the model, made anew, in its dtype, mode and device."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self.make()
        # A graph module is tried as it is: those of torch.export refuse `train()`.
        if self.form == "graph":
            return model
        model = model.to(self.dtype).train(self.training)
        return model.to("meta") if self.device == "meta" else model

    def capture(self) -> Captured:
        """Return the model and its graph module, equal ones each time.

        Exporting and tracing is slow, so the model is made once, until something writes into it or `forget` is called.
        The graph module is a new one each time.
        """
        # A pass edits these graph modules themselves, and `GraphModule(model, graph)` would not make them again.
        if self.form in ("graph", "capture"):
            model = self.model()
            return Captured(model, traced(model, self.form, self.example()))
        # By values: no version counter tells of `parameter.data.mul_(2)`.
        if not self._known or dict(tensors_of(self._known[0][0])) != self._known[0][2]:
            model, is_exported = self.model(), self.form.startswith("export")
            found = (exported if is_exported else traced)(model, self.form, self.example())
            kept = found.graph if isinstance(found, GraphModule) else found
            self._known[:] = [(model, kept, dict(tensors_of(model)))]
        model, made, _ = self._known[0]
        if not isinstance(made, Graph):
            return Captured(model, made.module())
        graph_module = GraphModule(model, copy.deepcopy(made))
        graph_module.training = model.training
        return Captured(model, graph_module)

    def forget(self) -> None:
        """Capture the model anew next time."""
        self._known.clear()

    def example(self) -> Inputs:
        """Return a fresh copy of the first inputs."""
        return self._converted(self.inputs)

    def all_inputs(self) -> Iterator[tuple[str, Inputs]]:
        """Yield further inputs, each with a name: those given, other batch sizes, an empty batch, other strides."""
        for number, other in enumerate(self.others):
            yield f"others[{number}]", self._converted(other)
        if self.batched and self.device != "meta":
            for size in (1, 7, 0):
                yield "an empty batch" if size == 0 else f"a batch of {size}", self._resized(size)
        yield "inputs that are not contiguous", self._map(self.example(), _spread)

    def _resized(self, size: int) -> Inputs:
        def resized(x: Tensor) -> Tensor:
            # Rows of the example, repeated: other numbers might be no indices of an embedding.
            return x if not x.dim() else x[torch.arange(size) % max(1, x.shape[0])].clone()

        return self._map(self.example(), resized)

    def _converted(self, given: OneInput) -> Inputs:
        def converted(x: Tensor) -> Tensor:
            x = x.detach().clone()
            x = x.to(self.dtype) if x.is_floating_point() else x
            return x.to("meta") if self.device == "meta" else x

        return self._map(read_inputs(given)[0], converted)

    def _map(self, inputs: Inputs, function: Callable[[Tensor], Tensor]) -> Inputs:
        args, kwargs = torch.utils._pytree.tree_map_only(Tensor, function, (inputs.args, inputs.kwargs))
        return Inputs(*args, **kwargs)


def _spread(x: Tensor) -> Tensor:
    """Return equal values with strides of another order."""
    return x if x.dim() < 2 else x.transpose(0, -1).contiguous().transpose(0, -1)
