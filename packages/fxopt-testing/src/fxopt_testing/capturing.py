"""Graph modules of a model that an assertion is given."""

from __future__ import annotations

import copy

from torch import nn
from torch.fx import GraphModule

from fxopt_core import PreconditionError, faithful_copy
from fxopt_testing.cases import ModelCase
from fxopt_testing.forms import Form, exported, missing_for, traced
from fxopt_tools import Inputs


def graph_module_of(model: object, inputs: Inputs, form: Form) -> GraphModule:
    """Return a graph module of a copy of a model, in a form; a graph module is copied as it is.

    Raises:
        PreconditionError: What is given is no model, a class for instance, or what the form needs is not installed.
    """
    if isinstance(model, ModelCase):
        return model.capture().graph_module
    if isinstance(model, GraphModule):
        return faithful_copy(model)
    if not isinstance(model, nn.Module):
        made = f"; write {model.__name__}()" if isinstance(model, type) else ""
        raise PreconditionError(
            f"an assertion is given a {type(model).__name__}, expected a model or a ModelCase{made}"
        )
    missing = missing_for(form)
    if missing is not None:
        raise PreconditionError(f"form {form!r} needs {missing}, which is not installed")
    copied = copy.deepcopy(model)
    if form.startswith("export"):
        program = exported(copied, form, inputs).module()
        assert isinstance(program, GraphModule)
        return program
    return traced(copied, form, inputs)


def inputs_of(model: nn.Module | ModelCase, inputs: tuple[object, ...]) -> Inputs:
    """Return what a model is called with: `Inputs` as they are, other values as positional arguments."""
    if isinstance(model, ModelCase):
        return model.example()
    if len(inputs) == 1 and isinstance(inputs[0], Inputs):
        return inputs[0]
    return Inputs(*inputs)
