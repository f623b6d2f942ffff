"""The module tree of a capture: fresh modules, the model's own tensors, its keys, ties and flags."""

from __future__ import annotations

from collections import deque
from functools import cache
from typing import Any

import pytest
import torch
from footprints import Footprint
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_capture import capture
from fxopt_core import kept
from fxopt_core.errors import CaptureError


class Varied(nn.Module):
    """Ties, unused parameters, aliases, buffers of both kinds and a plain tensor attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4, bias=False)
        self.body = nn.Sequential(
            nn.Linear(4, 4), nn.Dropout(0.5), nn.ModuleList([nn.Linear(1, 1)])[0], nn.BatchNorm1d(4)
        )
        self.body[2] = nn.Identity()
        self.alias = self.head
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.head.weight
        self.unused = nn.Conv2d(1, 1, 1)
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("offset", torch.arange(4.0))
        self.register_buffer("hidden", torch.ones(4), persistent=False)
        self.register_buffer("nothing", None)
        self.constant = torch.full((4,), 2.0)
        self.calls = 0
        self.seen: list[torch.Size] = []

    def forward(self, x: Tensor) -> Any:
        self.calls += 1
        self.seen.append(x.shape)
        self.last = "x"
        x = self.body(self.head(x)) * self.scale + self.offset
        return self.tied(x) * self.hidden + self.constant + torch.tensor(0.5)


@pytest.fixture(scope="module")
def model() -> Varied:
    torch.manual_seed(0)
    model = Varied().eval()
    model.tied.weight.requires_grad_(False)
    return model


@pytest.fixture(scope="module")
def captured(model: Varied) -> GraphModule:
    return capture(model, torch.randn(2, 4))


def test_keys_order_and_values(model: Varied, captured: GraphModule) -> None:
    expected, found = model.state_dict(keep_vars=True), captured.state_dict(keep_vars=True)
    assert list(found) == list(expected)
    assert all(found[key] is expected[key] for key in expected)


def test_ties_and_names(model: Varied, captured: GraphModule) -> None:
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    assert [name for name, _ in captured.named_parameters(remove_duplicate=False)] == names
    assert captured.alias is captured.head
    assert captured.get_submodule("tied").weight is captured.get_submodule("head").weight is model.head.weight
    assert not captured.get_submodule("tied").weight.requires_grad


def test_no_module_is_shared_with_the_model(model: Varied, captured: GraphModule) -> None:
    assert not {id(module) for module in model.modules()} & {id(module) for module in captured.modules()}


def test_buffers_keep_their_kind(model: Varied, captured: GraphModule) -> None:
    assert "hidden" not in captured.state_dict()
    assert captured.hidden is model.hidden
    assert captured.nothing is None


def test_the_model_is_untouched() -> None:
    model, x = Varied().train(), torch.randn(2, 4)
    model.body.eval()
    before = Footprint(model)
    capture(model, x)
    changes = Footprint(model).differences(before)
    assert [line for line in changes if not line.startswith("context: ")] == []  # torch sets variables of its own


def test_a_tensor_kept_in_an_attribute_is_warned_of_and_taken_back() -> None:
    class Keeping(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.last = x * 2
            return self.last + 1

    model = Keeping().eval()
    with pytest.warns(UserWarning, match="self.last was assigned during export"):
        captured = capture(model, torch.randn(2, 4))
    assert not hasattr(model, "last")
    assert torch.equal(captured(torch.ones(3, 4)), torch.full((3, 4), 3.0))


class Counting(nn.Module):
    """Counts its calls in a tensor that is no buffer, and in a list of them."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = torch.zeros(1)
        self.kept = [torch.zeros(1)]

    def forward(self, x: Tensor) -> Tensor:
        self.plain.add_(1)
        self.kept[0].add_(1)
        return x * self.plain * self.kept[0]


def test_plain_tensors_keep_their_values() -> None:
    model = nn.Sequential(Counting()).eval()
    captured = capture(model, torch.randn(2, 4))
    assert [vars(model[0])[name] for name in ("plain", "kept")] == [torch.zeros(1), [torch.zeros(1)]]
    assert captured(torch.ones(3, 4)).unique().tolist() == [1]
    assert captured(torch.ones(3, 4)).unique().tolist() == [4]


class Stepping(nn.Module):
    """Does something else at every call, or at the second, by what an attribute holds."""

    def __init__(self, held: Any, *, fails: bool = False) -> None:
        super().__init__()
        self.held, self.fails = held, fails

    def forward(self, x: Tensor) -> Tensor:
        if self.fails and self.held:
            raise ValueError("called twice")
        if isinstance(self.held, list):
            self.held[-1].append(x)
            return x * len(self.held[-1])
        self.held = x if self.held is None else self.held + 1
        return x if self.fails else x * self.held


@pytest.mark.parametrize(
    ("held", "fails", "change", "reason"),
    [
        (0, True, "from 0 to 1", "it raises ValueError: called twice"),
        (0, False, "from 0 to 1", "output differs in 8 elements"),
        (None, False, "from None to a FakeTensor", "output differs in 8 elements"),
        ([deque()], False, r"from \[\[\]\] to \[\[FakeTensor.*", "output differs in 8 elements"),
    ],
)
@pytest.mark.filterwarnings("ignore:The tensor attribute self.1.held was assigned:UserWarning")
def test_an_attribute_that_calls_change_and_outputs_follow_is_refused(
    held: Any, fails: bool, change: str, reason: str
) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Stepping(held, fails=fails)).eval()
    with pytest.raises(CaptureError, match=f"a call of it changes `1.held` {change}, and in the next call {reason}"):
        capture(model, torch.randn(2, 4))
    assert vars(model[1])["held"] == ([deque()] if isinstance(held, list) else held)


@cache
def table() -> Tensor:
    return torch.arange(4.0)


def test_tables_that_code_caches_outside_of_the_model_hold_values() -> None:
    class Shifted(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + table()

    captured = capture(Shifted(), torch.zeros(2, 4))
    assert torch.equal(captured(torch.zeros(3, 4)), table().expand(3, 4))


def test_tensors_of_inference_mode_keep_their_values() -> None:
    model = Counting().eval()
    with torch.inference_mode():
        model.plain = torch.full((1,), 3.0)
    with kept(model), torch.inference_mode():
        model.plain.add_(1)
    assert model.plain.tolist() == [3]


def test_gradients_reach_the_same_parameters(model: Varied, captured: GraphModule) -> None:
    x = torch.randn(3, 4, requires_grad=True)
    wanted = [x, *(parameter for parameter in model.parameters() if parameter.requires_grad)]
    found = torch.autograd.grad(captured(x).sum(), wanted, allow_unused=True, materialize_grads=True)
    expected = torch.autograd.grad(model(x).sum(), wanted, allow_unused=True, materialize_grads=True)
    assert all(torch.equal(left, right) for left, right in zip(found, expected, strict=True))


def test_a_name_that_graph_modules_use_is_refused() -> None:
    model = nn.ModuleDict({"graph": nn.Linear(2, 2)})
    with pytest.raises(CaptureError, match="graph has a name"):
        capture(model, torch.randn(2, 2))
