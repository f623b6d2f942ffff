"""Modules are as they were after a block that ran them: attributes, containers, plain tensors, and random numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt_core import kept

X = torch.linspace(-2, 2, 12).reshape(3, 4)


class Counts(nn.Module):
    """A layer that does something else each time."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.seen: list[Tensor] = []
        self.total = torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        self.seen.append(x)
        self.total += 1
        return x * self.calls + self.total + len(self.seen)


def test_a_model_that_raises_starts_anew() -> None:
    class Raises(Counts):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError(super().forward(x))

    model: Any = Raises()
    with pytest.raises(ValueError), kept(model):
        model(X)
    assert (model.calls, model.seen, model.total.item()) == (0, [], 0)


def test_one_tensor_at_two_places_gets_its_values_back() -> None:
    class Shares(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.zeros(2)
            self.inner: Any = nn.Module()
            self.inner.b = self.a

        def forward(self, x: Tensor) -> Any:
            self.a += 1
            return x + self.inner.b.sum()

    module = Shares()
    a = module.a
    with kept(module):
        assert module(X)[0, 0] == X[0, 0] + 2
    assert module.a is a and module.inner.b is a and a.tolist() == [0, 0]


def test_random_numbers_go_on_as_if_nothing_had_been_drawn() -> None:
    torch.manual_seed(0)
    expected = torch.rand(2)
    torch.manual_seed(0)
    with kept(nn.ReLU()):
        torch.rand(3)
    assert torch.equal(torch.rand(2), expected)


def test_values_in_nested_containers_come_back() -> None:
    module: Any = nn.ReLU()
    module.cache = {"layers": [{"key": torch.zeros(2)}]}
    key = module.cache["layers"][0]["key"]
    with kept(module):
        key += 1
        module.cache["layers"].append(torch.ones(1))
    assert len(module.cache["layers"]) == 1 and module.cache["layers"][0]["key"] is key and not key.any()


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_buffers_come_back_beside_a_script_module() -> None:
    norm, script = nn.BatchNorm1d(3), torch.jit.script(nn.BatchNorm1d(3))
    model = nn.ModuleDict({"norm": norm, "script": script})
    with kept(model, buffers=True):
        script(norm(torch.randn(4, 3)))
    assert norm.running_mean is not None and norm.running_mean.tolist() == [0, 0, 0]
