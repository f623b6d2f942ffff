"""Tensors are overwritten, and rolled back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxopt_checkpoints.rollback import Rollback


def test_values_come_back_bit_for_bit_into_the_same_memory() -> None:
    tensor = torch.tensor([1.0, -0.0, float("nan")])
    bits, memory = tensor.view(torch.int32).clone(), tensor.data_ptr()
    rollback = Rollback()
    for value in (2.0, 3.0):
        rollback.keep(tensor)
        tensor.fill_(value)
    rollback.run()
    assert torch.equal(tensor.view(torch.int32), bits)
    assert tensor.data_ptr() == memory


@pytest.mark.parametrize("first", [0, 1])
def test_memory_may_be_shared(first: int) -> None:
    whole = torch.arange(4.0)
    tensors = (whole, whole[1:3])
    rollback = Rollback()
    for tensor in (tensors[first], tensors[1 - first]):
        rollback.keep(tensor)
        tensor.fill_(9.0)
    rollback.run()
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_parameter_that_is_trained_comes_back() -> None:
    parameter = nn.Parameter(torch.ones(2))
    rollback = Rollback()
    rollback.keep(parameter)
    with torch.no_grad():
        parameter.zero_()
    rollback.run()
    assert parameter.tolist() == [1.0, 1.0]
    assert parameter.requires_grad and parameter.is_leaf


def test_replaced_tensors_come_back_themselves() -> None:
    norm = nn.BatchNorm1d(2)
    before, order = dict(norm.state_dict(keep_vars=True)), list(norm._parameters)
    rollback = Rollback(keeps_values=False)
    for _ in range(2):
        rollback.replace(norm, "weight", nn.Parameter(torch.zeros(2)))
        rollback.replace(norm, "running_mean", torch.zeros(2))
    assert norm.weight.tolist() == [0.0, 0.0]
    rollback.run()
    assert all(norm.state_dict(keep_vars=True)[key] is tensor for key, tensor in before.items())
    assert list(norm._parameters) == order


def test_without_kept_values_writes_stay() -> None:
    tensor = torch.ones(2)
    rollback = Rollback(keeps_values=False)
    rollback.keep(tensor)
    tensor.zero_()
    rollback.run()
    assert tensor.tolist() == [0.0, 0.0]


def test_what_has_no_values_is_left_out() -> None:
    tensor = torch.ones(2, device="meta")
    rollback = Rollback()
    rollback.keep(tensor)
    rollback.run()
    assert tensor.is_meta
