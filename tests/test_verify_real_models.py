"""`verify` on real models: right rewrites pass, planted errors are found. The benchmark has more of both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from nightly import mostly_nightly

from benchmarks import verification
from fxopt_capture import capture
from fxopt_core import faithful_copy, history, registry
from fxopt_tools import verify

SEEDS = 3
FOUND = ("one element wrong by 3 means", "one sample times 1.5")


@pytest.fixture(scope="module", params=mostly_nightly(verification.MODELS, ["Llama"]))
def model(request: pytest.FixtureRequest) -> Any:
    try:
        return verification.MODELS[request.param]()
    except ImportError as error:
        pytest.skip(f"not installed: {error}")


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.nightly)], ids=str)
def test_right_rewrites_pass_and_planted_errors_do_not(model: Any, dtype: torch.dtype) -> None:
    made, draw = model
    module = made.to(dtype)
    inputs = [verification.cast(draw(seed), dtype) for seed in range(SEEDS)]
    graph_module = capture(module, inputs[0].args, inputs[0].kwargs)
    result = registry().pipeline("fold-batch-norm,merge-linears")(faithful_copy(graph_module))
    assert any(record.rewrites for record in history(result))
    report = verify(module, result, inputs)
    assert report, str(report)
    for error in FOUND:
        wrong = verification.planted(module, verification.PLANTS[error])
        assert wrong is not None
        report = verify(module, wrong, inputs)
        assert {output.number for output in report.failures} == set(range(SEEDS)), f"{error}\n{report}"
