"""`verify` on real models: right rewrites pass, planted errors are found."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from architectures import BY_NAME
from torch import Tensor, nn

from fxopt_capture import capture
from fxopt_core import faithful_copy, history, registry
from fxopt_tools import verify

SIZES = ((2, 8), (2, 11), (3, 8))


def one_element(output: Tensor) -> Tensor:
    """Wrong by three times the mean."""
    output = output.clone()
    output.view(-1)[output.numel() // 2] += 3 * output.abs().mean()
    return output


def one_sample(output: Tensor) -> Tensor:
    """Larger by half."""
    return torch.cat([output[:1] * 1.5, output[1:]])


def plant(change: Callable[[Tensor], Tensor], module: nn.Module, args: object, output: Any) -> Any:
    """Change the first output, as a hook."""
    first = next(iter(output))
    output[first] = change(output[first])
    return output


@pytest.mark.nightly  # by day small modules show it, and a Llama in test_verify_transformers.py
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["Llama", "BERT", "ResNet"])
def test_right_rewrites_pass_and_planted_errors_do_not(name: str, dtype: torch.dtype) -> None:
    model = BY_NAME[name].build(pytest.importorskip("transformers")).to(dtype)
    drawn = [BY_NAME[name].example(*size) for size in SIZES]
    inputs = [{key: each.to(dtype) if each.is_floating_point() else each for key, each in one.items()} for one in drawn]
    graph_module = capture(model, (), inputs[0], dynamic_shapes=BY_NAME[name].varying())
    result = registry().pipeline("fold-batch-norm,merge-linears")(faithful_copy(graph_module))
    assert any(record.rewrites for record in history(result))
    report = verify(model, result, inputs)
    assert report, str(report)
    for change in (one_element, one_sample):
        wrong = copy.deepcopy(model)
        wrong.register_forward_hook(partial(plant, change))
        report = verify(model, wrong, inputs)
        assert {output.number for output in report.failures} == set(range(len(SIZES))), str(report)
