"""One model in each form of graph, and what has to hold of a rewrite of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from fxopt_core import ReversibleTransformation, history, infer_shapes, iter_nodes
from fxopt_onednn import PackedConv2d, PackedLinear

FORMS = ("modules", "functions", "export")


class FunctionTracer(torch.fx.Tracer):
    """Traces into torch's own modules, so that functions and ``get_attr`` nodes stand in the graph."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return False


def graph_of(model: nn.Module, form: str, *inputs: Any) -> GraphModule:
    """Return a model as a graph, with shapes known and the batch dynamic."""
    if form == "export":
        dynamic = tuple({0: torch.export.Dim.AUTO} for _ in inputs)
        exported: GraphModule = torch.export.export(model, inputs, dynamic_shapes=dynamic, strict=False).module()
        return exported
    tracer = torch.fx.Tracer() if form == "modules" else FunctionTracer()
    return infer_shapes(GraphModule(model, tracer.trace(model)), *inputs)


def structure(graph_module: GraphModule) -> list[object]:
    """Return what undoing has to bring back, comparable by ``==``."""
    rows: list[object] = []
    for node in iter_nodes(graph_module.graph):
        call = (node.name, node.op, str(node.target), str(node.args), str(node.kwargs))
        rows.append((*call, list(map(str, node.users))))
    rows += [(name, type(m), m.training, sorted(vars(m))) for name, m in graph_module.named_modules()]
    rows += [(name, p.requires_grad, p.dtype) for name, p in graph_module.named_parameters()]
    rows += [(key, value.flatten().tolist()) for key, value in graph_module.state_dict().items()]
    return rows


def assert_computes(graph_module: nn.Module, model: nn.Module, *inputs: Tensor, tolerance: float = 1e-5) -> None:
    """Compare results, and inputs after the run."""
    mine, theirs = [x.clone() for x in inputs], [x.clone() for x in inputs]
    found, expected = tree_leaves(graph_module(*mine)), tree_leaves(model(*theirs))
    assert len(found) == len(expected)
    for one, other in zip([*found, *mine], [*expected, *theirs], strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def check(
    transformation: ReversibleTransformation,
    model: nn.Module,
    form: str,
    *inputs: Tensor,
    sites: int,
    others: Sequence[tuple[Tensor, ...]] = (),
) -> GraphModule:
    """Apply a pass and check all that holds of every rewrite; return the rewritten graph module.

    The right number of sites; equal results and effects, with and without gradients, channels last too; twice is once;
    exact undo, on a copy; the caller's model untouched.
    """
    before = {key: (id(value), value._version) for key, value in model.state_dict(keep_vars=True).items()}
    graph_module = graph_of(model, form, *inputs)
    transformation(graph_module, expect=sites)
    for each in (inputs, *others):
        with torch.no_grad():
            assert_computes(graph_module, model, *each)
            last = [x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in each]
            assert_computes(graph_module, model, *last)
        assert_computes(graph_module, model, *each)
    once = structure(graph_module)
    transformation(graph_module)
    assert structure(graph_module) == once
    restored = graph_of(model, form, *inputs)
    start = structure(restored)
    transformation(transformation(restored), reverse=True)
    assert structure(restored) == start
    assert {key: (id(value), value._version) for key, value in model.state_dict(keep_vars=True).items()} == before
    return graph_module


def packed(graph_module: GraphModule) -> list[PackedConv2d | PackedLinear]:
    """Return the packed layers, in order."""
    return [module for module in graph_module.modules() if isinstance(module, PackedConv2d | PackedLinear)]


def refused(graph_module: GraphModule) -> list[tuple[str, str]]:
    """Return site and reason of what the last pass refused."""
    return [(refusal.site, refusal.reason) for refusal in history(graph_module)[-1].refusals]


def operations(graph_module: GraphModule) -> list[str]:
    """Return what the nodes call, in order, without inputs and results."""
    return [_called(graph_module, node) for node in iter_nodes(graph_module.graph) if node.op.startswith("call_")]


def _called(graph_module: GraphModule, node: Node) -> str:
    if node.op == "call_module":
        return type(graph_module.get_submodule(str(node.target))).__name__
    return str(getattr(node.target, "_opname", None) or getattr(node.target, "__name__", node.target))
