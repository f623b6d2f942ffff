"""Overwriting tensors, and taking it back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxopt_core.overwriting import Overwriting


def test_values_come_back_bit_for_bit_into_the_same_memory() -> None:
    tensor = torch.tensor([1.0, -0.0, float("nan")])
    bits, memory = tensor.view(torch.int32).clone(), tensor.data_ptr()
    writes = Overwriting()
    for value in (2.0, 3.0):
        writes.keep(tensor)
        tensor.fill_(value)
    writes.take_back()
    assert torch.equal(tensor.view(torch.int32), bits)
    assert tensor.data_ptr() == memory


@pytest.mark.parametrize("first", [0, 1])
def test_memory_may_be_shared(first: int) -> None:
    whole = torch.arange(4.0)
    tensors = (whole, whole[1:3])
    writes = Overwriting()
    for tensor in (tensors[first], tensors[1 - first]):
        writes.keep(tensor)
        tensor.fill_(9.0)
    writes.take_back()
    assert whole.tolist() == [0.0, 1.0, 2.0, 3.0]


def test_a_parameter_that_is_trained_comes_back() -> None:
    parameter = nn.Parameter(torch.ones(2))
    writes = Overwriting()
    writes.keep(parameter)
    with torch.no_grad():
        parameter.zero_()
    writes.take_back()
    assert parameter.tolist() == [1.0, 1.0]
    assert parameter.requires_grad and parameter.is_leaf


def test_replaced_tensors_come_back_themselves() -> None:
    norm = nn.BatchNorm1d(2)
    before, order = dict(norm.state_dict(keep_vars=True)), list(norm._parameters)
    writes = Overwriting(keeps_values=False)
    for _ in range(2):
        writes.replace(norm, "weight", nn.Parameter(torch.zeros(2)))
        writes.replace(norm, "running_mean", torch.zeros(2))
    assert norm.weight.tolist() == [0.0, 0.0]
    writes.take_back()
    assert all(norm.state_dict(keep_vars=True)[key] is tensor for key, tensor in before.items())
    assert list(norm._parameters) == order


def test_without_kept_values_writes_stay() -> None:
    tensor = torch.ones(2)
    writes = Overwriting(keeps_values=False)
    writes.keep(tensor)
    tensor.zero_()
    writes.take_back()
    assert tensor.tolist() == [0.0, 0.0]


def test_what_has_no_values_is_left_out() -> None:
    tensor = torch.ones(2, device="meta")
    writes = Overwriting()
    writes.keep(tensor)
    writes.take_back()
    assert tensor.is_meta
