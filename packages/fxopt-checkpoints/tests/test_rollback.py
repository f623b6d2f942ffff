"""Tensors are overwritten, and rolled back."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxopt_checkpoints.rollback import Rollback


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


def test_tensors_that_are_put_in_are_not_kept() -> None:
    linear, made = nn.Linear(2, 2), nn.Parameter(torch.ones(2, 2))
    rollback = Rollback()
    rollback.replace(linear, "weight", made)
    rollback.keep(made)
    with torch.no_grad():
        made.zero_()
    rollback.run()
    assert linear.weight is not made and not made.any()
