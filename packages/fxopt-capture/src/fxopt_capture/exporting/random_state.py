"""The random state of a process: torch's on all devices of a model, Python's, and numpy's where it is loaded."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import nn
from torch.utils import _pytree as pytree


@contextmanager
def random_state_kept(model: nn.Module, inputs: Mapping[str, object]) -> Iterator[None]:
    """Restore the random state after a ``with`` block in which a model may draw random numbers.

    >>> import random
    >>> expected = random.Random(0).random()
    >>> random.seed(0)
    >>> with random_state_kept(nn.ReLU(), {}):
    ...     drawn = random.random()
    >>> drawn == random.random() == expected
    True
    """
    leaves = (*model.parameters(), *model.buffers(), *pytree.tree_leaves(dict(inputs)))
    devices = sorted({leaf.get_device() for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_cuda})
    numbers, numpy = random.getstate(), sys.modules.get("numpy")
    arrays = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        random.setstate(numbers)
        if numpy is not None:
            numpy.random.set_state(arrays)
