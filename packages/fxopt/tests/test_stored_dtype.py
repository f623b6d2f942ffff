"""Plain models in a dtype that the processor has no instructions for are computed in float32."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import fxopt
from fxopt.drop_in.stored_dtype import slow_dtype


class Net(nn.Module):
    """Results of two dtypes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.layers(x).mean((2, 3)))
        return {"logits": logits, "shares": logits.float().softmax(-1)}


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> torch.dtype:
    """A dtype that this processor is taken to have no instructions for."""
    monkeypatch.setattr(torch.ops.mkldnn, "_is_mkldnn_fp16_supported", lambda: False)
    return torch.float16


@torch.no_grad()
def test_computed_in_float32(slow: torch.dtype, tmp_path: Path) -> None:
    model, x = Net().eval().to(slow), torch.randn(2, 3, 9, 9, dtype=slow)
    assert slow_dtype(model) is not None
    fast = fxopt.optimize(model, (x,))
    assert fxopt.history(fast)[0].options_text == "stored='float16'"
    assert {weight.dtype for weight in fast.parameters()} == {torch.float32}
    assert {weight.dtype for weight in model.parameters()} == {slow}
    assert fxopt.verify(model, fast, x).passed
    other = copy.deepcopy(model)
    for weight in other.parameters():
        weight.mul_(1.5)
    fxopt.load_original_state_dict(fast, other.state_dict())
    fxopt.save(fast, tmp_path / "net.fxopt")
    larger = torch.randn(5, 3, 12, 20, dtype=slow)
    for each in (fast, pickle.loads(pickle.dumps(fast)), fxopt.load(tmp_path / "net.fxopt")):
        for name, expected in other(larger).items():
            assert each(larger)[name].dtype == expected.dtype
            torch.testing.assert_close(each(larger)[name], expected, rtol=1e-2, atol=1e-2)


@pytest.mark.skipif(fxopt.isa() is None, reason="the library was not built")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_pipelines_that_narrow_weights_take_models_of_any_dtype(dtype: torch.dtype) -> None:
    """Their operators compute in float32, so that a model would go on as it is, or be converted at each layer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64), nn.LayerNorm(64)).eval().to(dtype)
    x = torch.randn(8, 64, dtype=dtype)
    fast = fxopt.optimize(model, (x,), pipeline="cpu-inference-int8")
    assert fxopt.history(fast)[0].pass_name == "compute-in-float32"
    assert sum(isinstance(layer, fxopt.PanelLinear) for layer in fast.modules()) == 2
    assert fast(x).dtype == dtype
    assert {weight.dtype for weight in model.parameters()} == {dtype}


def test_left_alone(slow: torch.dtype) -> None:
    """By other pipelines, and in training mode."""
    x = torch.randn(2, 3, 9, 9, dtype=slow)
    for model, pipeline in ((Net().eval(), "fold-batch-norm"), (Net().train(), None)):
        fast = fxopt.optimize(model.to(slow), (x,), pipeline=pipeline, verify=False)
        assert {weight.dtype for weight in fast.parameters()} == {slow}
