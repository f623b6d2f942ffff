"""`check_rewrite`: all that a rewrite of one model in one form of graph has to keep, and more that tests look at."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Proxy
from torch.utils._pytree import tree_leaves

from fxopt_core import Refusal, ReversibleTransformation, Transformation, history
from fxopt_rewrite.shapes.infer import infer_shapes
from fxopt_testing import forms
from fxopt_testing.forms import TRACED, Form, traced_by
from fxopt_testing.pictures import changes, picture, tensors_of
from fxopt_tools import Inputs

FORMS: tuple[Form, ...] = (*TRACED, "export", "export-dynamic")


def check_rewrite(
    transformation: Transformation,
    model: nn.Module,
    *inputs: Any,
    sites: int,
    form: Form = "modules",
    others: Sequence[tuple[Any, ...]] = (),
    backward: bool = True,
    again: bool = True,
    tolerance: float = 1e-4,
) -> GraphModule:
    """Assert everything that every rewrite has to keep, and return the rewritten graph module.

    The pass rewrites the expected number of sites; results, effects on inputs, and gradients stay equal; a second run
    changes nothing; undo restores everything exactly, and the pass can be applied again; the caller's model is
    untouched. `refused` then returns what the pass left alone, with reasons.

    Args:
        transformation: the pass.
        model: the caller's model.
        *inputs: what it is called with.
        sites: how many sites are rewritten.
        form: the form of graph.
        others: further inputs; those that the guards of an export refuse are left out.
        backward: whether gradients are compared, too.
        again: whether the pass is applied once more after undoing, which does not restore the shape of every value.
        tolerance: how far numbers may differ, relatively and absolutely. It is wide by default, as gradients of squares
            sum up many rounding errors.

    Raises:
        AssertionError: Some of it does not hold.

    >>> from fxopt_core import LintAndRecompile
    >>> rewritten = check_rewrite(LintAndRecompile(), nn.ReLU(), torch.ones(2), sites=0)
    >>> refused(rewritten)
    []
    """
    graph_module = graph_of(model, form, *inputs)
    untouched = fingerprint(model)  # torch's tracer leaves tensors that it met as constants in the model
    start = structure(graph_module)
    expected = _outcomes(graph_module, form, [inputs, *others], backward)
    graph_module.zero_grad()
    transformation(graph_module, expect=sites)
    for args, wanted in expected:
        _assert_same_outcome(outcome(graph_module, *args, backward=backward), wanted, tolerance)
    once = structure(graph_module)
    transformation(graph_module)
    _assert_unchanged("after a second run", once, structure(graph_module))
    if isinstance(transformation, ReversibleTransformation):
        transformation(graph_module, reverse=True)
        _assert_unchanged("after undoing", start, structure(graph_module))
        _assert_same_outcome(outcome(graph_module, *inputs, backward=backward), expected[0][1], tolerance=0.0)
        if again:
            transformation(graph_module, expect=sites)
            redone = structure(graph_module)
            assert len(redone) == len(once)
            assert redone["keys of the state_dict"] == once["keys of the state_dict"]
    model.zero_grad()
    _assert_unchanged("in the caller's model", untouched, fingerprint(model))
    return graph_module


def _assert_unchanged(when: str, before: dict[str, object], after: dict[str, object]) -> None:
    found = (f"{when}, {what} is {now}, was {was}" for what, now, was in changes(before, after))
    assert before == after, "; ".join(found)


def _outcomes(
    graph_module: GraphModule, form: Form, inputs: list[tuple[Any, ...]], backward: bool
) -> list[tuple[tuple[Any, ...], Outcome]]:
    found = [(inputs[0], outcome(graph_module, *inputs[0], backward=backward))]
    for args in inputs[1:]:
        try:
            found.append((args, outcome(graph_module, *args, backward=backward)))
        except Exception:
            assert form.startswith("export"), "only the guards of an export may refuse inputs"
    return found


class _Tracer(torch.fx.Tracer):
    """Traces into subclasses of torch's layers, as `torch.fx.symbolic_trace` does and the zoo does not."""

    proxy_buffer_attributes = True


def graph_of(model: nn.Module, form: Form, *inputs: Any) -> GraphModule:
    """Return a model as a graph that shares its modules and tensors, with shapes known."""
    if form == "modules":
        return infer_shapes(traced_by(_Tracer(), model), *inputs)
    return forms.graph_of(model, form, Inputs(*inputs))


def refusals(graph_module: GraphModule) -> Sequence[Refusal]:
    """Return what the last pass refused."""
    return history(graph_module)[-1].refusals


def refused(graph_module: GraphModule) -> list[tuple[str, str]]:
    """Return site and reason code of what the last pass refused."""
    return [(refusal.site, refusal.reason) for refusal in refusals(graph_module)]


def setitem(x: Any, index: Any, value: Any) -> None:
    """Do ``x[index] = value``, in a model that is traced, too."""
    if isinstance(x, Proxy):
        x.tracer.create_proxy("call_function", operator.setitem, (x, index, value), {})
    else:
        x[index] = value


def structure(graph_module: GraphModule) -> dict[str, object]:
    """Return all that undoing has to restore, and that a second run must not change: comparable by ``==``."""
    return picture(graph_module, marks=True) | _attributes(graph_module)


def fingerprint(model: nn.Module) -> dict[str, object]:
    """Return all of a caller's model that no pass may touch: values, memory, versions, flags, keys, hooks."""
    rows = dict(tensors_of(model)) | _attributes(model) | {"keys": list(model.state_dict())}
    for name, module in model.named_modules(remove_duplicate=False):
        hooks = [len(value) for key, value in sorted(vars(module).items()) if key.endswith("_hooks")]
        rows[f"module `{name}`"] = id(module), hooks
    for key, tensor in model.state_dict(keep_vars=True).items():
        memory = 0 if tensor.is_meta or nn.parameter.is_lazy(tensor) else tensor.data_ptr()
        rows[f"tensor `{key}`"] = id(tensor), memory, tensor._version, tensor.stride()
    return rows


def _attributes(root: nn.Module) -> dict[str, object]:
    modules = root.named_modules(remove_duplicate=False)
    return {f"attributes of `{name}`": (type(m), m.training, sorted(vars(m))) for name, m in modules}


@dataclass
class Outcome:
    """What a run of a module gives: results, inputs afterwards, gradients by the names of parameters and inputs."""

    results: list[Any]
    inputs: list[Any]
    gradients: dict[str, Tensor | None] = field(default_factory=dict)


def outcome(module: nn.Module, *inputs: Any, backward: bool = True) -> Outcome:
    """Run a module forwards and, where something requires grad, backwards."""
    module.zero_grad()
    leaves = [
        x.clone().requires_grad_(backward and x.is_floating_point()) if isinstance(x, Tensor) else x for x in inputs
    ]
    given = [x.clone() if isinstance(x, Tensor) else x for x in leaves]
    results = tree_leaves(module(*given))
    losses = [r.double().square().sum() for r in results if isinstance(r, Tensor) and r.requires_grad]
    if losses and backward:
        torch.stack(losses).sum().backward()  # type: ignore[no-untyped-call]  # so it is in torch
    gradients = {name: p.grad for name, p in module.named_parameters()}
    gradients |= {f"input {i}": x.grad for i, x in enumerate(leaves) if isinstance(x, Tensor)}
    return Outcome(results, given, gradients)


def _assert_same_outcome(found: Outcome, expected: Outcome, tolerance: float) -> None:
    """Compare results, inputs after the run, and the gradients that both have."""
    assert len(found.results) == len(expected.results)
    pairs = zip([*found.results, *found.inputs], [*expected.results, *expected.inputs], strict=True)
    for number, (one, other) in enumerate(pairs):
        what = f"result {number}" if number < len(found.results) else f"input {number - len(found.results)} afterwards"
        _assert_same(what, one, other, tolerance)
        if isinstance(one, Tensor):
            assert one.requires_grad == other.requires_grad, f"{what} has requires_grad={one.requires_grad}"
    for name in found.gradients.keys() & expected.gradients.keys():
        _assert_same(f"gradient by {name}", found.gradients[name], expected.gradients[name], tolerance)


def _assert_same(what: str, found: Any, expected: Any, tolerance: float) -> None:
    if not isinstance(found, Tensor) or not isinstance(expected, Tensor):
        assert found is expected or found == expected, what
    else:
        torch.testing.assert_close(
            found, expected, rtol=tolerance, atol=tolerance, equal_nan=True, msg=lambda text: f"{what}: {text}"
        )
