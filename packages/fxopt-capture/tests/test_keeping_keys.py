"""Graph modules that are traced without inputs have the keys of their model."""

from __future__ import annotations

from typing import Any

import torch
from footprints import Footprint
from torch import Tensor, nn

from fxopt_capture import symbolic_trace


class Part(nn.Module):
    """A layer that is read, one that is not, and a head of its own class that is not either."""

    def __init__(self) -> None:
        super().__init__()
        self.unread = nn.Linear(4, 2)
        self.read = nn.Linear(4, 4)
        self.mask = nn.Buffer(torch.ones(4), persistent=False)
        self.nothing: nn.Module | None
        self.register_module("nothing", None)
        self.register_buffer("absent", None)

    def forward(self, x: Tensor) -> Any:
        return self.read(x) * self.mask


class Model(nn.Module):
    """Reads its tensors in another order than it has them, and some of them not at all."""

    def __init__(self) -> None:
        super().__init__()
        self.spare = nn.Parameter(torch.ones(3))
        self.scale = nn.Parameter(torch.ones(4))
        self.count = nn.Buffer(torch.zeros(4))
        self.scratch = nn.Buffer(torch.ones(4), persistent=False)
        self.plain = torch.ones(4)
        self.head = Part()
        self.second, self.first = Part(), nn.Linear(4, 4)
        self.alias = self.first
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.eval()

    def forward(self, x: Tensor) -> Any:
        return self.second(self.first(x) + self.plain) * self.scratch * self.scale + self.count


def test_keys_their_order_and_what_is_not_saved_are_those_of_the_model() -> None:
    model = Model()
    traced = symbolic_trace(model)
    assert list(traced.state_dict()) == list(model.state_dict())
    assert [name for name, _ in traced.named_parameters(remove_duplicate=False)] == [
        name for name, _ in model.named_parameters(remove_duplicate=False)
    ]
    assert all(one is other for one, other in zip(traced.parameters(), model.parameters(), strict=True))
    assert dict(traced.named_buffers()).keys() == {*dict(model.named_buffers()), "plain"}
    x = torch.randn(2, 4)
    assert torch.equal(traced(x), model(x))


def test_names_and_ties_of_modules_stay() -> None:
    model = Model()
    traced = symbolic_trace(model)
    assert traced.get_submodule("alias") is traced.get_submodule("first")
    assert traced.get_parameter("tied.weight") is traced.get_parameter("first.weight")
    assert {name for name, _ in traced.named_modules()} == {name for name, _ in model.named_modules()}
    assert not traced.get_submodule("head").training


def test_the_model_stays_as_it_was() -> None:
    model = Model()
    before = Footprint(model)
    traced = symbolic_trace(model)
    traced.delete_submodule("head.unread")
    traced.delete_submodule("second.unread")
    assert Footprint(model).differences(before) == []
    layer = nn.Linear(2, 2)
    del symbolic_trace(layer).bias
    assert layer.bias is not None
