"""Calls take and return containers of all kinds as the model does."""

from __future__ import annotations

import dataclasses
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from fxopt_capture import capture

X = torch.randn(5, 4)


class Pair(NamedTuple):
    """A named tuple."""

    left: Tensor
    right: Any


@dataclasses.dataclass
class Record:
    """A dataclass."""

    value: Tensor
    more: list[Tensor] | None = None


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "tensor": lambda x: x + 1,
    "tuple": lambda x: (x + 1, x * 2),
    "list of one": lambda x: [x + 1],
    "dictionary": lambda x: {
        "b": x + 1,
        "a": {0: x * 2, 1: None},
        "default": defaultdict(list, {"k": [x * 3]}),
        "nothing": (None, x, (), {}),
        "sizes": (x.shape[0], 3, "text"),
    },
    "ordered": lambda x: OrderedDict(b=x + 1, a=x * 2),
    "named tuple": lambda x: Pair(x, (x * 2,)),
    "dataclass": lambda x: Record(x + 1, [x]),
    "itself": lambda x: x,
}


class Returning(nn.Module):
    """Returns its outputs in some structure."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def forward(self, x: Tensor) -> Any:
        return OUTPUTS[self.name](x)


@pytest.mark.parametrize("name", OUTPUTS)
def test_outputs_are_of_the_models_own_types(name: str) -> None:
    captured, expected = capture(Returning(name), torch.randn(2, 3)), OUTPUTS[name](X[:, :3])
    found = captured(X[:, :3])
    assert type(found) is type(expected) and repr(found) == repr(expected)
    assert getattr(found, "keys", tuple)() == getattr(expected, "keys", tuple)()


def test_plain_inputs_and_outputs_need_no_pytrees() -> None:
    class Model(nn.Module):
        def forward(self, input: Tensor, other: Tensor) -> tuple[Tensor, Tensor]:
            return input + 1, input * other

    captured = capture(Model(), (torch.randn(2, 4), torch.randn(2, 4)))
    assert "pytree" not in captured.code and "return (add, mul)" in captured.code
    found = captured(X, other=2 * X)
    assert type(found) is tuple and torch.equal(found[1], X * 2 * X)
    assert torch.equal(captured(other=2 * X, input=X)[0], X + 1)
