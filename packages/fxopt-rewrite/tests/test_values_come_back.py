"""Undoing restores the values of all nodes of a site, inner ones too, where the graph notes fake tensors."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule, Node

from fxopt_core import iter_nodes, undo
from fxopt_rewrite import Editor, GraphIndex, ReversibleSitePass, infer_shapes
from fxopt_rewrite.shapes.infer import describe_values, fake_values

CALLS = ("call_function", "call_method")


class Model(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x.sum(1) * 2) + 1


class Deep(Model):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(5, 5) for _ in range(20)))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layers(x))


def described(graph_module: GraphModule) -> dict[str, tuple[object, ...]]:
    calls = (node for node in iter_nodes(graph_module.graph) if node.op in CALLS)
    values = {node.name: node.meta["val"] for node in calls if "val" in node.meta}
    return {name: (*map(str, value.shape), value.dtype, *map(str, value.stride())) for name, value in values.items()}


@dataclass(frozen=True, eq=False)
class Chain:
    nodes: tuple[Node, ...]
    label: str = "chain"


class ToTanh(ReversibleSitePass[Chain]):
    """relu(sum(x) * 2) -> tanh(x)"""

    def match(self, index: GraphIndex) -> Iterable[Chain]:
        calls = [node for node in index.nodes if node.op in CALLS]
        return [Chain(tuple(calls[:3]))] if len(calls) == 4 else []

    def rewrite(self, site: Chain, edit: Editor) -> None:
        total, scaled, relu = site.nodes
        made = edit.call_function(torch.tanh, total.args[0], before=relu, like=[relu])
        edit.replace(relu, made)
        edit.erase(scaled)
        edit.erase(total)


@pytest.mark.parametrize("form", ["traced", "exported"])
def test_values_inside_a_site_come_back(form: str) -> None:
    x = torch.ones(3, 4, 5)
    if form == "traced":
        graph_module = infer_shapes(torch.fx.symbolic_trace(Model()), x)
    else:
        exported = torch.export.export(Model(), (x,), dynamic_shapes=({0: torch.export.Dim.AUTO},)).module()
        assert isinstance(exported, GraphModule)
        graph_module = exported
    before = described(graph_module)
    ToTanh()(graph_module, expect=1)
    assert described(graph_module) != before
    undo(graph_module)
    assert described(graph_module) == before


def test_a_value_that_cannot_be_worked_out_is_left_open() -> None:
    """The input's value is of another rank since, so that summing over its dimension 1 fails."""
    graph_module = infer_shapes(torch.fx.symbolic_trace(Model()), torch.ones(3, 4, 5))
    ToTanh()(graph_module, expect=1)
    x = next(iter_nodes(graph_module.graph))
    x.meta["val"] = x.meta["val"][0, 0]
    undo(graph_module)
    assert [node.name for node in iter_nodes(graph_module.graph) if "val" not in node.meta] == ["sum_1", "mul"]


def test_describing_nodes_copies_no_layer_that_they_do_not_call(monkeypatch: pytest.MonkeyPatch) -> None:
    graph_module = infer_shapes(torch.fx.symbolic_trace(Deep()), torch.ones(3, 4, 5))
    before, copied, copy = described(graph_module), list[object](), FakeTensorMode.from_tensor

    def counted(mode: FakeTensorMode, tensor: Tensor, **settings: Any) -> Any:
        copied.append(tensor)
        return copy(mode, tensor, **settings)

    ToTanh()(graph_module, expect=1)
    monkeypatch.setattr(FakeTensorMode, "from_tensor", counted)
    undo(graph_module)
    assert described(graph_module) == before
    assert not copied


def test_a_node_that_names_nothing_is_left_open() -> None:
    """`lint` refuses such a graph, but describing it raises nothing."""
    graph_module = infer_shapes(torch.fx.symbolic_trace(Model()), torch.ones(3, 4, 5))
    with graph_module.graph.inserting_before(graph_module.graph.output_node()):
        node = graph_module.graph.create_node("get_attr", "gone.weight")
    describe_values(graph_module, [node], fake_values(graph_module.graph))
    assert "val" not in node.meta
