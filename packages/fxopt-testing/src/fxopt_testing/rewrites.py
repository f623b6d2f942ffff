"""Helpers for tests of passes beside `assert_rewrites`: graphs in a form, refusals, and comparable states."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

from torch import nn
from torch.fx import GraphModule, Proxy

from fxopt_core import Refusal, history
from fxopt_testing import forms
from fxopt_testing.forms import Form
from fxopt_testing.models import ALL
from fxopt_testing.pictures import picture
from fxopt_tools import Inputs

FORMS = ALL


def graph_of(model: nn.Module, form: Form, *inputs: Any) -> GraphModule:
    """Return a model as a graph that shares its modules and tensors, with shapes known."""
    return forms.graph_of(model, form, Inputs(*inputs))


def refusals(graph_module: GraphModule) -> Sequence[Refusal]:
    """Return what the last pass refused."""
    return history(graph_module)[-1].refusals


def refused(graph_module: GraphModule) -> list[tuple[str, str]]:
    """Return site and reason code of what the last pass refused."""
    return [(refusal.site, refusal.reason) for refusal in refusals(graph_module)]


def setitem(x: Any, index: Any, value: Any) -> None:
    """Do ``x[index] = value``, also in a traced model."""
    if isinstance(x, Proxy):
        x.tracer.create_proxy("call_function", operator.setitem, (x, index, value), {})
    else:
        x[index] = value


def structure(graph_module: GraphModule) -> dict[str, object]:
    """Return all that undoing has to restore, and that a second run must not change: comparable by ``==``."""
    modules = graph_module.named_modules(remove_duplicate=False)
    attributes = {f"attributes of `{name}`": (type(m), m.training, sorted(vars(m))) for name, m in modules}
    return picture(graph_module, marks=True) | attributes
