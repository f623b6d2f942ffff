"""Tensors are overwritten, and rolled back."""

from __future__ import annotations

import pytest
import torch

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
