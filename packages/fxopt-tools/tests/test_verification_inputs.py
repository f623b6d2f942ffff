"""`verify`: the inputs that it takes, and that it leaves nothing behind."""

from __future__ import annotations

import copy
import random
from collections import OrderedDict
from typing import Any

import pytest
import torch
from site_passes import Computes
from torch import Tensor, nn
from verified_calls import Calls, X, compare

from fxopt_core import PreconditionError, VerificationError
from fxopt_tools import Inputs, verify

# --- Inputs


def test_forms_of_inputs() -> None:
    def add(a: Tensor, b: Tensor | int = 1) -> Tensor:
        return a + b

    report = verify(
        Calls(add), Calls(add), [X, (X, 2), {"a": X, "b": X}, Inputs(X, b=3), (X.int(),), OrderedDict(a=X, b=X)]
    )
    assert report and [output.number for output in report.outputs] == [0, 1, 2, 3, 4, 5]
    assert verify(Calls(add), Calls(add), X) and verify(Calls(add), Calls(add), {"a": X})


@pytest.mark.parametrize("inputs", [[], 3, [[X]], {1: X}, "x", None])
def test_other_forms_are_refused(inputs: Any) -> None:
    with pytest.raises(PreconditionError, match="expected"):
        verify(nn.ReLU(), nn.ReLU(), inputs)


def test_the_original_refuses() -> None:
    with pytest.raises(
        PreconditionError, match=r"the original \(Linear\) refuses input 1 \(args\[0\]: torch.float32"
    ) as e:
        verify(nn.Linear(4, 4), nn.Linear(4, 4), [X, X[:, :3]])
    assert isinstance(e.value.__cause__, RuntimeError)


def test_the_transformed_refuses() -> None:
    with pytest.raises(PreconditionError, match=r"the transformed module \(Linear\) refuses input 0") as e:
        verify(nn.Linear(4, 4), nn.Linear(5, 4), X)
    assert isinstance(e.value.__cause__, RuntimeError)


def test_inputs_that_cannot_be_copied_are_refused() -> None:
    with pytest.raises(PreconditionError, match="cannot be copied"):
        compare(lambda x: 1, lambda x: 1, (i for i in range(3)))


def test_results_of_differentiable_operations_are_fine_as_inputs() -> None:
    x = (torch.ones(3, requires_grad=True) * 2).requires_grad_()
    assert compare(lambda x, y: (x.requires_grad, y[0] is x, x), lambda x, y: (True, True, x), x, [x])
    assert x.grad_fn is not None


def test_inference_mode_is_fine() -> None:
    with torch.inference_mode():
        x, model = torch.ones(2, 4), nn.Linear(4, 4)
        assert verify(model, copy.deepcopy(model), x)
    assert verify(model, copy.deepcopy(model), x)


def test_that_a_module_agrees_with_itself_is_noted() -> None:
    model = nn.ReLU()
    report = verify(model, model, X)
    assert report.passed
    assert "same object" in report.notes[-1]


def test_what_is_not_initialised_is_refused() -> None:
    with pytest.raises(PreconditionError, match="`weight` of the LazyLinear is not initialised yet"):
        verify(nn.LazyLinear(3), nn.LazyLinear(3), X)


def test_the_meta_device_holds_no_numbers() -> None:
    model = nn.Linear(4, 4, device="meta")
    report = verify(model, copy.deepcopy(model), X.to("meta"))
    with pytest.raises(VerificationError, match="saw nothing: `output` of input 0 is on the meta device"):
        report.raise_if_failed()


# --- Nothing is left behind


def test_inputs_are_not_altered_and_writes_into_them_are_compared() -> None:
    def writes(x: Tensor) -> Tensor:
        return x.mul_(2) + 1

    x = X.clone()
    report = compare(writes, writes, x)
    assert report and [output.path for output in report.outputs] == ["output", "args[0] after the call"]
    assert torch.equal(x, X) and x._version == 0
    report = compare(writes, lambda x: x * 2 + 1, x)
    assert [output.path for output in report.failures] == ["args[0] after the call"]
    assert torch.equal(x, X)


def test_inputs_that_share_memory_share_it_in_each_run() -> None:
    def writes(x: Tensor, y: Tensor) -> Tensor:
        x.zero_()
        return y + 0

    x = X.clone()
    assert compare(writes, lambda x, y: torch.zeros(4) * x.zero_()[0], x, x[0])
    assert compare(writes, lambda x, y: torch.zeros(3, 4) * x.zero_(), x, x)
    assert torch.equal(x, X)


def test_buffers_and_counters_are_restored_in_train_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)).train()
    twin = copy.deepcopy(model)
    before = copy.deepcopy(model.state_dict())
    buffers = {name: (buffer, buffer._version) for name, buffer in model.named_buffers()}
    assert verify(model, twin, [X, X])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(buffers[name] == (buffer, buffer._version) for name, buffer in model.named_buffers())
    assert model.training and model[1].training


def test_buffers_that_are_replaced_or_shared_are_restored() -> None:
    class Counts(nn.Module):
        count: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count = self.count + 1
            return x * self.count

    original, twin = Counts(), Counts()
    count = original.count
    twin.count = count  # traced graphs share leaf modules and buffers with the model
    assert verify(original, twin, [X, X])
    assert original.count is count and twin.count is count and count.item() == 0


def test_an_embedding_that_renormalises_itself_is_restored() -> None:
    model = nn.Sequential(nn.Embedding(5, 3, max_norm=0.1))
    weight = model.get_parameter("0.weight").detach().clone()
    report = verify(model, copy.deepcopy(model), torch.tensor([0, 1]))
    assert report and not report.notes and torch.equal(model.get_parameter("0.weight"), weight)


def test_parameters_that_a_run_writes_are_noted() -> None:
    original, other = (Computes(lambda m, x: x * m.scale.add_(0), scale=nn.Parameter(torch.ones(()))) for _ in "ab")
    report = verify(original, other, X)
    assert report and any("the original writes to its parameter `scale`" in note for note in report.notes)
    assert len(report.notes) == 2


def test_random_numbers_are_the_same_in_each_run_and_the_callers_are_untouched() -> None:
    def draws(x: Tensor) -> Any:
        return torch.rand(3), x + torch.randn_like(x), random.random()

    state, python = torch.get_rng_state(), random.getstate()
    assert compare(draws, draws, X)
    assert torch.equal(state, torch.get_rng_state()) and random.getstate() == python


def test_no_gradients_are_recorded_and_none_change() -> None:
    model = nn.Linear(4, 4)
    report = verify(model, Calls(lambda x: (torch.is_grad_enabled(), model(x))[1]), X.clone().requires_grad_())
    assert report and model.weight.grad is None and torch.is_grad_enabled()
    assert compare(lambda x: (torch.is_grad_enabled(), x), lambda x: (False, x), X)
