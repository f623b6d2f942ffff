"""One model in each form of graph, and what has to hold of any rewrite of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from fxopt_core import ReversibleTransformation, Transformation, history, infer_shapes, iter_nodes

FORMS = ("modules", "functions", "export", "export-dynamic")
TRACED = ("modules", "functions")


class ModuleTracer(torch.fx.Tracer):
    """Leaves torch's own modules whole; buffers that a model reads itself are nodes, not constants."""

    proxy_buffer_attributes = True


class FunctionTracer(ModuleTracer):
    """Traces into torch's own modules, so that functions and ``get_attr`` nodes stand in the graph."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False

    def to_bool(self, obj: object) -> bool:
        return False  # batch norm asks whether the rank of its input is wrong


def graph_of(model: nn.Module, form: str, *inputs: Any) -> GraphModule:
    """Return a model as a graph, with shapes known."""
    if form.startswith("export"):
        dynamic = tuple(
            {0: torch.export.Dim.AUTO} if isinstance(x, Tensor) and x.dim() > 1 and form == "export-dynamic" else None
            for x in inputs
        )
        exported: GraphModule = torch.export.export(model, inputs, dynamic_shapes=dynamic, strict=False).module()
        return exported
    tracer = ModuleTracer() if form == "modules" else FunctionTracer()
    return infer_shapes(GraphModule(model, tracer.trace(model)), *inputs)


@dataclass
class Outcome:
    """What a run of a module gives: results, inputs afterwards, gradients."""

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


def assert_same_outcome(found: Outcome, expected: Outcome, tolerance: float) -> None:
    """Compare results, inputs after the run, and the gradients that both have."""
    assert len(found.results) == len(expected.results)
    for one, other in zip([*found.results, *found.inputs], [*expected.results, *expected.inputs], strict=True):
        if isinstance(one, Tensor):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
            assert one.requires_grad == other.requires_grad
        else:
            assert one == other
    for name in found.gradients.keys() & expected.gradients.keys():
        one, other = found.gradients[name], expected.gradients[name]
        assert (one is None) == (other is None), name
        if one is not None:
            torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)


def structure(module: nn.Module) -> list[object]:
    """Return all that undoing has to bring back, and that a second run must not change: comparable by ``==``."""
    rows: list[object] = []
    if isinstance(module, GraphModule):
        for node in iter_nodes(module.graph):
            call = (node.name, node.op, str(node.target), str(node.args), str(node.kwargs))
            rows.append((*call, sorted(user.name for user in node.users), "fxopt" in node.meta))
    rows += [(name, type(m), m.training, sorted(vars(m))) for name, m in module.named_modules(remove_duplicate=False)]
    rows += [(name, p.requires_grad, p.dtype, p.device) for name, p in module.named_parameters(remove_duplicate=False)]
    rows += [(key, tuple(t.shape), t.dtype, *_contents(t)) for key, t in module.state_dict().items()]
    return rows


def _contents(tensor: Tensor) -> tuple[object, ...]:
    return () if tensor.is_meta else (tensor.detach().cpu().contiguous().flatten().view(torch.uint8).tolist(),)


def fingerprint(model: nn.Module) -> list[object]:
    """Return all of a caller's model that no pass may touch: values, storage, flags, keys, hooks."""
    rows = structure(model)
    for name, module in model.named_modules(remove_duplicate=False):
        rows.append((name, id(module), [len(v) for k, v in sorted(vars(module).items()) if k.endswith("_hooks")]))
    for key, tensor in model.state_dict(keep_vars=True).items():
        rows.append((key, id(tensor), 0 if tensor.is_meta else tensor.data_ptr(), tensor._version, tensor.stride()))
    return rows


def refused(graph_module: GraphModule) -> list[tuple[str, str]]:
    """Return site and reason of what the last pass refused."""
    return [(refusal.site, refusal.reason) for refusal in history(graph_module)[-1].refusals]


def check(
    transformation: Transformation,
    model: nn.Module,
    form: str,
    *inputs: Any,
    sites: int,
    others: Sequence[tuple[Any, ...]] = (),
    backward: bool = True,
    tolerance: float = 1e-4,
) -> GraphModule:
    """Apply a pass and check all that holds of every rewrite; return the rewritten graph module.

    The right number of sites; equal results, effects and gradients, on other inputs too as far as the graph takes them;
    twice is once; exact undo; the caller's model untouched. The tolerance is wide: gradients of squares sum up many
    rounding errors.
    """
    untouched = fingerprint(model)
    graph_module = graph_of(model, form, *inputs)
    start = structure(graph_module)
    expected = {}
    for args in (inputs, *others):
        try:
            expected[id(args)] = (args, outcome(graph_module, *args, backward=backward))
        except Exception:
            assert args is not inputs and form.startswith("export")  # the guards of an export refuse some sizes
    graph_module.zero_grad()
    transformation(graph_module, expect=sites)
    for args, wanted in expected.values():
        assert_same_outcome(outcome(graph_module, *args, backward=backward), wanted, tolerance)
    once, keys = structure(graph_module), list(graph_module.state_dict())
    transformation(graph_module)
    assert structure(graph_module) == once
    if isinstance(transformation, ReversibleTransformation):
        transformation(graph_module, reverse=True)
        assert structure(graph_module) == start
        assert_same_outcome(outcome(graph_module, *inputs, backward=backward), expected[id(inputs)][1], tolerance=0.0)
        transformation(graph_module, expect=sites)
        assert [len(structure(graph_module)), list(graph_module.state_dict())] == [len(once), keys]
    model.zero_grad()
    assert fingerprint(model) == untouched
    return graph_module
