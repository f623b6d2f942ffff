"""State in plain attributes: every run starts from the same, and none is left behind."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx import Tracer, symbolic_trace

from fxopt_core import LintAndRecompile, instrumented
from fxopt_tools import Verify, verify
from fxopt_tools.keeping import attributes_kept

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


class CountsTracer(Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Counts)


def test_a_layer_that_both_modules_share_starts_from_the_same_in_each_run() -> None:
    model = nn.Sequential(Counts(), nn.ReLU())
    traced = torch.fx.GraphModule(model, CountsTracer().trace(model))
    counts: Any = model[0]
    total = counts.total
    assert any(module is counts for module in traced.modules())
    report = verify(model, traced, [X, X])
    assert report, str(report)
    assert (counts.calls, counts.seen) == (0, []) and counts.total is total and total.item() == 0


def test_gating_passes_leaves_nothing_behind() -> None:
    model = nn.Sequential(Counts())
    traced = torch.fx.GraphModule(model, CountsTracer().trace(model))
    with instrumented(Verify(X)):
        LintAndRecompile()(traced)
    counts: Any = traced.get_submodule("0")
    assert (counts.calls, counts.seen) == (0, [])


def test_so_does_a_model_that_raises() -> None:
    class Raises(Counts):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError(super().forward(x))

    model: Any = Raises()
    with pytest.raises(ValueError), attributes_kept(model):
        model(X)
    assert (model.calls, model.seen, model.total.item()) == (0, [], 0)


def test_whatever_comes_goes_and_whatever_goes_comes_back() -> None:
    module = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    module.mapping, module.queue, module.names = {"a": 1}, deque([1, 2], 2), {"a"}  # type: ignore[assignment]  # plain attributes
    module.gone = "there"  # type: ignore[assignment]  # a plain attribute
    before, keys = dict(vars(module)), list(module.state_dict())
    weight = module[0].weight
    found: Any = module
    with attributes_kept(module):
        found.mapping["b"] = 2
        found.queue.append(3)
        found.names.clear()
        found.added = torch.ones(2)
        found.late = nn.Linear(1, 1)
        found.register_buffer("buffer", torch.ones(1))
        found[0].weight = nn.Parameter(torch.zeros(2, 2))
        found.register_forward_hook(lambda *_: None)
        del found.gone
        found.eval()
    assert dict(vars(module)) == before and list(module.state_dict()) == keys
    assert (
        found.mapping == {"a": 1} and list(found.queue) == [1, 2] and found.queue.maxlen == 2 and found.names == {"a"}
    )
    assert module[0].weight is weight and not module._forward_hooks and module.training and found.gone == "there"


def test_one_tensor_at_two_places_is_one_tensor_meanwhile() -> None:
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
    with attributes_kept(module):
        assert module(X)[0, 0] == X[0, 0] + 2 and module.a is not a
    assert module.a is a and module.inner.b is a and a.tolist() == [0, 0]


def test_order_and_identity_of_unchanged_containers_are_kept() -> None:
    module = symbolic_trace(nn.Sequential(nn.Linear(2, 2), nn.ReLU()))
    children, modules = module._modules, list(module._modules)
    with attributes_kept(module):
        module(torch.ones(2))
    assert module._modules is children and list(module._modules) == modules
