"""What has to hold of a rewrite for oneDNN beside what holds of every one, and what such a graph holds."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.utils._pytree import tree_leaves

from fxopt_core import ReversibleTransformation, iter_nodes
from fxopt_cpu import PackedConv2d
from fxopt_testing import assert_rewrites
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import graph_of

FORMS: tuple[Form, ...] = ("modules", "functions", "export-dynamic")


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
    *inputs: Tensor,
    sites: int | None = None,
    form: Form = "modules",
    others: Sequence[tuple[Tensor, ...]] = (),
) -> GraphModule:
    """Assert what holds of every rewrite, and equal results without gradients, for channels-last inputs too."""
    assert_rewrites(transformation, model, *inputs, count=sites, form=form, others=others, gradients=False)
    graph_module = transformation(graph_of(model, form, *inputs))
    for each in (inputs, *others):
        with torch.no_grad():
            assert_computes(graph_module, model, *each)
            last = [x.contiguous(memory_format=torch.channels_last) if x.dim() == 4 else x for x in each]
            assert_computes(graph_module, model, *last)
        assert_computes(graph_module, model, *each)
    return graph_module


def packed(graph_module: GraphModule) -> list[PackedConv2d]:
    """Return the packed layers, in order."""
    calls = [node for node in iter_nodes(graph_module.graph) if node.op == "call_module"]
    modules = [graph_module.get_submodule(str(node.target)) for node in calls]
    return [module for module in modules if isinstance(module, PackedConv2d)]


def calls(graph_module: GraphModule) -> int:
    """Return how many calls there are, without those that check inputs."""
    return sum(node.op.startswith("call_") and "guards" not in node.name for node in iter_nodes(graph_module.graph))
