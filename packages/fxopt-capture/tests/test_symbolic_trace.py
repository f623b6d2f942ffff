"""`symbolic_trace` for plain modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt_capture import CapturedModule, symbolic_trace
from fxopt_capture.tracing import Examples
from fxopt_core.errors import CaptureError


class Masked(nn.Module):
    """Takes a mask or not."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Any:
        y = self.lin(x)
        return y if mask is None else y * mask


X, MASK = torch.randn(2, 4), torch.rand(2, 4)


@pytest.fixture
def model() -> Masked:
    return Masked().eval()


@pytest.mark.parametrize(
    ("names", "examples", "inputs"),
    [
        (None, X, ["x"]),
        (None, (X,), ["x"]),
        (None, (X, MASK), ["x", "mask"]),
        (None, {"x": X, "mask": MASK}, ["x", "mask"]),
        (["x"], {"x": X, "mask": MASK}, ["x"]),
        (["mask", "x"], (MASK, X), ["x", "mask"]),
    ],
)
def test_examples(model: Masked, names: list[str] | None, examples: Examples, inputs: list[str]) -> None:
    traced = symbolic_trace(model, names, example_inputs=examples)
    assert isinstance(traced, CapturedModule)
    assert [node.target for node in traced.graph.find_nodes(op="placeholder")] == inputs
    given = {"x": torch.randn(5, 4), "mask": torch.rand(5, 4)}
    given = {name: given[name] for name in inputs}
    assert torch.equal(traced(**given), model(**given))


def test_unknown_names(model: Masked) -> None:
    with pytest.raises(CaptureError, match="takes no input 'mak'; did you mean 'mask'"):
        symbolic_trace(model, ["x", "mak"], example_inputs=(X, MASK))
    with pytest.raises(CaptureError, match="It takes: x, mask"):
        symbolic_trace(model, ["something"])


def test_examples_that_do_not_fit_the_names(model: Masked) -> None:
    with pytest.raises(CaptureError, match="lack 'mask'"):
        symbolic_trace(model, ["x", "mask"], example_inputs={"x": X})
    with pytest.raises(CaptureError, match="2 input_names and 1 example_inputs"):
        symbolic_trace(model, ["x", "mask"], example_inputs=(X,))


def test_without_examples_it_is_torchs_trace() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.ReLU())
    traced, expected = symbolic_trace(model), torch.fx.symbolic_trace(model)
    assert [(node.op, node.name, node.target) for node in traced.graph.nodes] == [
        (node.op, node.name, node.target) for node in expected.graph.nodes
    ]
    assert traced.get_submodule("0") is model[0]


def test_input_names_need_examples(model: Masked) -> None:
    with pytest.raises(CaptureError, match="input_names of Masked need example_inputs, as it is not of transformers"):
        symbolic_trace(model, ["x"])


def test_a_failed_trace_says_where_and_asks_for_examples() -> None:
    class Branching(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if x.shape[0] > 1:
                return x
            return -x

    with pytest.raises(CaptureError, match=r"test_symbolic_trace.py:\d+, in forward: `if x.shape.*Give example_inputs"):
        symbolic_trace(Branching())
    assert torch.equal(symbolic_trace(Branching(), example_inputs=X)(X), X)
