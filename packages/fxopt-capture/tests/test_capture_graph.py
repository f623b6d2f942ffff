"""The graph of a capture: what is in it, in which order, and with which metadata."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from site_passes import Computes
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_capture import capture
from fxopt_core import iter_nodes


class Block(nn.Module):
    """Layers, parameters read by themselves, an operation in place and a value that nothing uses."""

    steps: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(4)
        self.scale = nn.Parameter(torch.ones(4, 1, 1))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: Tensor, residual: Tensor) -> Any:
        self.steps.add_(1)
        unused = x.exp() + 1  # noqa: F841
        y = self.bn(self.conv(x))
        y[:, 0] = 0
        y += residual
        return torch.relu_(y * self.scale)


@pytest.fixture(scope="module")
def model() -> Block:
    return Block().eval()


@pytest.fixture(scope="module")
def captured(model: Block) -> GraphModule:
    return capture(model, (torch.randn(2, 3, 6, 6), torch.randn(2, 4, 6, 6)))


def test_graph_reads_like_the_model(captured: GraphModule) -> None:
    nodes = [node for node in iter_nodes(captured.graph) if node.op != "output"]
    assert [node.name for node in nodes[:3]] == ["x", "residual", "_guards_fn"]
    names = [str(node.target) for node in nodes]
    assert names.index("conv") < names.index("bn") < names.index("aten.add_.Tensor", names.index("bn"))
    assert not any("exp" in name or "bn.weight" in name for name in names)


def test_graph_lints_and_keeps_effects_through_dead_code_elimination(model: Block, captured: GraphModule) -> None:
    captured.graph.lint()
    before = [node.name for node in iter_nodes(captured.graph)]
    captured.graph.eliminate_dead_code()
    assert [node.name for node in iter_nodes(captured.graph)] == before
    captured.recompile()
    x, residual = torch.randn(3, 3, 6, 6), torch.randn(3, 4, 6, 6)
    steps = model.steps.clone()
    found = captured(x, residual)
    assert model.steps == steps + 1
    torch.testing.assert_close(found, model(x, residual), rtol=0, atol=0)


def test_nodes_carry_metadata(captured: GraphModule) -> None:
    for node in iter_nodes(captured.graph):
        if node.op == "placeholder":
            assert isinstance(node.meta["val"], Tensor)
        if node.op == "call_function" or (node.op == "call_module" and node.target != "_guards_fn"):
            assert isinstance(node.meta["val"], Tensor)
            assert __file__ in node.meta["stack_trace"] or "torch" in node.meta["stack_trace"]
            assert next(iter(node.meta["nn_module_stack"].values()))[0] == ""
        if node.op == "get_attr":
            assert isinstance(node.meta["val"], Tensor)


def test_sizes_are_symbolic_in_the_batch(captured: GraphModule) -> None:
    (bn,) = (node for node in iter_nodes(captured.graph) if node.target == "bn")
    shape = bn.meta["val"].shape
    assert isinstance(shape[0], torch.SymInt)
    assert list(shape[1:]) == [4, 6, 6]


def test_assertions_that_cannot_fail_are_gone() -> None:
    class Masking(nn.Module):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            positions = torch.arange(x.shape[1], device=x.device).to(torch.float32).to("cpu")
            return x * mask.to(torch.bool).to("cpu") + (positions * 2).to(torch.float32)

    model = Masking().eval()
    captured = capture(model, (torch.randn(2, 3), torch.ones(2, 3, dtype=torch.int64)))
    assert not any("_assert_tensor_metadata" in str(node.target) for node in iter_nodes(captured.graph))
    x, mask = torch.randn(4, 3, dtype=torch.float64), torch.ones(4, 3, dtype=torch.int64)
    assert torch.equal(captured(x, mask), model(x, mask))


def test_random_operators_stay_although_nothing_reads_them() -> None:
    class Drawing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            torch.rand_like(x)
            return x + torch.rand_like(x)

    captured = capture(Drawing().eval(), torch.randn(2, 3))
    torch.manual_seed(0)
    found = captured(torch.zeros(2, 3))
    torch.manual_seed(0)
    assert torch.equal(found, Drawing()(torch.zeros(2, 3)))


def test_constants_get_names_that_are_free() -> None:
    model = Computes(
        lambda m, x: x * m.lifted_tensor_0 + torch.tensor([1.0, 2.0, 3.0]) + m.table["a"],
        lifted_tensor_0=nn.Parameter(torch.ones(3)),
        table={"a": torch.full((3,), 5.0)},
    ).eval()
    captured = capture(model, torch.randn(2, 3))
    assert list(captured.state_dict()) == ["lifted_tensor_0"]
    x = torch.randn(4, 3)
    assert torch.equal(captured(x), model(x))


def test_control_flow_operators_keep_their_branches() -> None:
    model = Computes(
        lambda m, x: torch.cond(x.sum() > 0, lambda y: m.lin(y), lambda y: y - 1, (x,)), lin=nn.Linear(3, 3)
    ).eval()
    captured = capture(model, torch.randn(2, 3))
    assert list(captured.state_dict()) == list(model.state_dict())
    for x in (torch.ones(2, 3), -torch.ones(2, 3)):
        torch.testing.assert_close(captured(x), model(x))
