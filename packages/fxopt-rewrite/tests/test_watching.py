"""What `Watched` notices of tensors, what it holds of them, and whom `refresh` asks to forget."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.utils import swap_tensors
from torch.utils.dlpack import from_dlpack

from fxopt_core import PreconditionError
from fxopt_rewrite import Watched, refresh

CHANGES: dict[str, Callable[[nn.Parameter], object]] = {
    "in place": lambda weight: weight.detach().mul_(2),
    "data": lambda weight: weight.data.mul_(2),
    "numpy": lambda weight: pytest.importorskip("numpy").multiply(weight.data.numpy(), 2, out=weight.data.numpy()),
    "dlpack": lambda weight: from_dlpack(weight.detach().__dlpack__()).mul_(2),
    "other memory": lambda weight: setattr(weight, "data", weight.data.clone()),
    "strides": lambda weight: setattr(weight, "data", weight.data.t()),
    "fewer rows": lambda weight: setattr(weight, "data", weight.data[:4]),
    "swapped": lambda weight: swap_tensors(weight, nn.Parameter(weight.detach() * 2)),  # type: ignore[no-untyped-call]  # untyped in torch
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("layout", ["rows", "columns", "slice"])
def test_a_change_is_noticed(change: Callable[[nn.Parameter], object], layout: str) -> None:
    values = torch.randn(16, 16)
    weight = nn.Parameter({"rows": values, "columns": values.t(), "slice": values[4:12, :].contiguous()}[layout])
    watched = Watched([weight])
    assert watched.hold([weight])
    change(weight)
    assert not watched.hold([weight])


@pytest.mark.parametrize("shape", [(1,), (3,), (8, 4, 3, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_the_first_number_of_any_dense_tensor_is_read(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Channels last, and smaller than a word."""
    values = torch.ones(shape, dtype=dtype)
    tensor = values.contiguous(memory_format=torch.channels_last) if len(shape) == 4 else values
    watched = Watched([tensor])
    tensor.data[0].fill_(2)
    assert not watched.hold([tensor])


def test_another_tensor_of_the_same_memory_is_another_one() -> None:
    weight, bias = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    watched = Watched([weight, bias])
    assert watched.are([weight, bias])
    for others in ([weight], [weight, bias, bias], [nn.Parameter(weight.data), bias], [bias, weight]):
        assert not watched.are(others)
        assert not watched.hold(others)
    assert watched.share_memory([weight.detach()[1:]])
    assert not watched.share_memory([torch.ones(4, 4)])


def test_nothing_is_held() -> None:
    """Neither tensors nor their memory, and no weak references, with which torch swaps no tensors."""
    weight = nn.Parameter(torch.ones(64, 64))
    watched = Watched([weight])
    assert not weakref.getweakrefs(weight)
    swap_tensors(weight, nn.Parameter(torch.zeros(2, 2)))  # type: ignore[no-untyped-call]  # untyped in torch
    gone = weakref.ref(weight)
    del weight
    gc.collect()
    assert gone() is None
    for _ in range(8):  # whatever takes its place
        assert not watched.hold([nn.Parameter(torch.ones(64, 64))])


def test_devices_and_forms_without_numbers_to_read() -> None:
    """Versions and places are compared there."""
    for tensor in (torch.ones(4, 4, device="meta"), torch.ones(0), torch.ones(4, 8)[:, ::2]):
        watched = Watched([tensor])
        assert watched.hold([tensor])
        tensor.add_(1)
        assert not watched.hold([tensor])


class Doubled(nn.Module):
    """Keeps twice its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.twice: Tensor | None = None

    def forward(self) -> Tensor:
        """Return it."""
        if self.twice is None:
            self.twice = 2 * self.weight.detach()
        return self.twice

    def forget_derived(self) -> None:
        """Drop it."""
        self.twice = None


def test_layers_of_others_are_asked_to_forget() -> None:
    layer = Doubled()
    model = nn.Sequential(nn.Sequential(layer))
    layer()
    layer.weight.data.fill_(3)
    refresh(model)
    assert layer().tolist() == [6, 6]


def test_refresh_takes_modules() -> None:
    with pytest.raises(PreconditionError, match=r"refresh is given a list, expected a module: a model or a layer"):
        refresh([nn.Linear(2, 2)])  # type: ignore[arg-type]
