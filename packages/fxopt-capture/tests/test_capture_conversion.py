"""`.to(dtype)` of captured modules: what they compute follows, or they refuse before anything is converted."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from archive_models import in_every_form
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_capture import capture
from fxopt_core.errors import CaptureError

X = torch.randn(3, 4)


class Zeros(nn.Module):
    """Makes a tensor in the dtype of its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + torch.zeros(4, dtype=self.linear.weight.dtype)


class Lowest(Zeros):
    """Fills with the lowest number of the dtype of its input."""

    def forward(self, x: Tensor) -> Any:
        states = self.linear(x)
        return states.masked_fill(states > 0, torch.finfo(x.dtype).min)


class Entering(Zeros):
    """Converts what it is given to the dtype of its weights."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x.to(self.linear.weight.dtype))


class Wide(Zeros):
    """Norms in float32 and returns to the dtype before, as many decoders do."""

    def forward(self, x: Tensor) -> Any:
        states = self.linear(x)
        return (states.to(torch.float32) * 2).to(states.dtype)


class Placed(Zeros):
    """Moves to a device, for which torch notes a dtype."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x).to("cpu") + 1


class Explicit(Zeros):
    """Has a dtype of its own."""

    def forward(self, x: Tensor) -> Any:
        return self.linear(x) + torch.ones((), dtype=torch.float32)


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "creation": (Zeros, r"`zeros` has torch\.float32 in it, perhaps from .*_conversion\.py:\d+, in forward"),
    "limit": (Lowest, r"`masked_fill` has -3\.4\d+e\+38 in it, perhaps from .*test_capture_conversion\.py:\d+"),
    "input": (Entering, r"`x` is converted there as a tensor of torch\.float32"),
    "there and back": (Wide, r"`linear(_1)?` is converted there as a tensor of torch\.float32"),
    "device": (Placed, r"`linear(_1)?` is converted there as a tensor of torch\.float32"),
}
CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "half": lambda module: module.half(),
    "bfloat16": lambda module: module.bfloat16(),
    "double": lambda module: module.double(),
    "to": lambda module: module.to(torch.bfloat16),
}


def state_of(module: nn.Module) -> Mapping[str, object]:
    return {name: (tensor.dtype, tensor._version, tensor.data_ptr()) for name, tensor in module.state_dict().items()}


def check_refused(captured: GraphModule, convert: Callable[[nn.Module], nn.Module], message: str) -> None:
    before = state_of(captured)
    with pytest.raises(CaptureError, match=message) as caught:
        convert(captured)
    assert "cannot be converted from torch.float32 to torch." in str(caught.value)
    assert str(caught.value).endswith("Convert the model, and capture it again")
    assert state_of(captured) == before


@pytest.mark.parametrize(("make", "message"), REFUSED.values(), ids=REFUSED)
def test_a_graph_with_the_dtype_of_the_weights_in_it_is_not_converted(
    make: Callable[[], nn.Module], message: str, tmp_path: Path
) -> None:
    """In every form, nor captured once more; what changes no dtype is no conversion."""
    model = make().eval()
    captured = capture(model, X)
    for each in in_every_form(captured, tmp_path):
        for convert in CONVERSIONS.values():
            check_refused(each, convert, message)
        for same in (each.float(), each.to("cpu"), each.to(torch.float32), each.requires_grad_(False)):
            assert torch.equal(same(X), model(X))
    check_refused(capture(nn.Sequential(captured), X), CONVERSIONS["half"], "cannot be converted")


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_that_do_not_come_from_the_weights_stay(dtype: torch.dtype) -> None:
    model = Explicit().eval()
    captured = capture(copy.deepcopy(model), X).to(dtype)
    found, expected = captured(X.to(dtype)), model.to(dtype)(X.to(dtype))
    assert found.dtype == expected.dtype
    assert torch.equal(found, expected)


def text_model(name: str, **options: object) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    cls: Any = getattr(transformers, name)
    model: nn.Module = cls(cls.config_class(vocab_size=50, **sizes, **options))
    return model.eval()


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertModel"])
def test_text_models_are_converted_or_refuse(name: str) -> None:
    model = text_model(name)
    inputs = {"input_ids": torch.randint(50, (2, 7)), "attention_mask": torch.ones(2, 7, dtype=torch.int64)}
    inputs["attention_mask"][0, :2] = 0
    captured: Any = capture(model, (), inputs)
    if name == "LlamaForCausalLM":
        for convert in CONVERSIONS.values():
            check_refused(captured, convert, "cannot be converted")
        with torch.no_grad():
            assert torch.equal(captured(**inputs)[0], model(**inputs)[0])
        return
    for dtype in (torch.bfloat16, torch.float64):
        converted, expected = copy.deepcopy(captured).to(dtype), copy.deepcopy(model).to(dtype)
        assert (captured.dtype, converted.dtype) == (torch.float32, dtype)
        with torch.no_grad():
            assert torch.equal(converted(**inputs)[0], expected(**inputs)[0])
