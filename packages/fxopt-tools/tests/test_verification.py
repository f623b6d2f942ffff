"""`verify`: what it compares, what it leaves alone, what it says."""

from __future__ import annotations

import copy
import math
from collections import namedtuple
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from verified_calls import Calls, X, compare

from fxopt_core import VerificationError
from fxopt_rewrite import tolerance
from fxopt_tools import verify

Point = namedtuple("Point", ["x", "y"])


def deep(dtype: torch.dtype, layers: int = 8) -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        blocks = [nn.Sequential(nn.Linear(32, 32), nn.LayerNorm(32), nn.GELU()) for _ in range(layers)]
    return nn.Sequential(*(layer for block in blocks for layer in block)).to(dtype).eval()


def seeded(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(1))


class Split(nn.Module):
    """Linears that sum in another order: what a pass may do, to the last bits."""

    def __init__(self, model: nn.Sequential) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.model:
            if isinstance(layer, nn.Linear):
                a, b = x.tensor_split(2, -1)
                v, w = layer.weight.tensor_split(2, 1)
                wide = torch.promote_types(x.dtype, torch.float32)  # kernels round products once, at the end
                x = (b.to(wide) @ w.to(wide).t() + a.to(wide) @ v.to(wide).t()).to(x.dtype) + layer.bias
            else:
                x = layer(x)
        return x


# --- Numbers


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_rounding_of_a_deep_network_passes_and_a_mistake_does_not(dtype: torch.dtype) -> None:
    model = deep(dtype)
    x = seeded(8, 32).to(dtype)
    report = verify(model, Split(model), x)
    assert report and not report.outputs[0].excused, str(report)
    (output,) = report.outputs
    assert output.dtype == dtype and output.tolerance == tolerance(dtype) and output.reference == "float64"
    assert output.max_absolute_error is not None and output.max_absolute_error > 0
    assert output.sqnr_db is not None and output.original_sqnr_db is not None
    assert dtype == torch.float64 or abs(output.sqnr_db - output.original_sqnr_db) < 6  # as near to the truth
    wrong = copy.deepcopy(model)
    with torch.no_grad():
        wrong.get_parameter("21.bias")[0] += 1
    assert not verify(model, wrong, x)


def test_rounding_that_depth_amplifies_is_excused_by_the_originals_own() -> None:
    model, x = deep(torch.float16, 36), seeded(64, 32).half()
    report = verify(model, Split(model), x)
    (output,) = report.outputs
    assert report and output.passed and "differs in" in str(output.excused)
    assert "as the original's own rounding is as large" in str(report)
    assert not verify(model, Split(model), x, rtol=1e-2, atol=5e-3)  # a stated tolerance is meant
    casts = nn.Sequential(Calls(lambda x: x.half()), model)
    report = verify(casts, nn.Sequential(Calls(lambda x: x.half()), Split(model)), x)
    assert not report and report.outputs[0].reference == "original"  # nothing tells how large its own rounding is


def test_sqnr_is_against_the_original_in_float64() -> None:
    model = nn.Linear(64, 4)
    x = torch.randn(16, 64)
    exact = (x.double() @ model.weight.detach().double().t() + model.bias.detach().double()).float()
    (output,) = verify(model, Calls(lambda x: exact), x).outputs
    assert output.sqnr_db is not None and output.original_sqnr_db is not None
    assert output.sqnr_db > output.original_sqnr_db  # rounded once, it is nearer to the truth than the original
    assert next(model.parameters()).dtype == torch.float32


def test_a_run_in_float64_that_goes_elsewhere_is_not_the_reference() -> None:
    report = compare(lambda x: x * (1 if x.dtype == torch.float32 else -1), lambda x: x * 1.0, X)
    assert report and report.outputs[0].reference == "original"


# --- Structure, as in test_output_trees.py, and other values


def test_paths_lead_to_what_differs() -> None:
    def nested(x: Tensor, shift: float = 0) -> Any:
        return {"a": [x, (x, Point(x, x + shift))], "b": None}

    report = compare(nested, lambda x: nested(x, 1), X)
    assert len(report.outputs) == 5 and [output.path for output in report.failures] == ["output['a'][1][1].y"]
    with pytest.raises(VerificationError, match=r"`output\['a'\]\[1\]\[1\].y` of input 0 differs in 12 elements"):
        report.raise_if_failed()


@pytest.mark.parametrize(
    ("original", "transformed", "path", "problem"),
    [
        (X, X.double(), "output", "has dtype torch.float64, expected torch.float32"),
        (X, X[:2], "output", "has shape (2, 4), expected (3, 4)"),
        (X, X[None], "output", "has shape (1, 3, 4), expected (3, 4)"),
        (X, X.to("meta"), "output", "has device meta, expected cpu"),
        (X, X.to_sparse(), "output", "has layout torch.sparse_coo, expected torch.strided"),
        (X, None, "output", "is NoneType None, expected a torch.float32 tensor of shape (3, 4)"),
        (X, [X], "output", "is list of 1, expected a torch.float32 tensor of shape (3, 4)"),
        ((X, X), [X, X], "output", "is list of 2, expected tuple of 2"),
        ((X, X), (X,), "output[1]", "is missing, expected a torch.float32 tensor of shape (3, 4)"),
        ((X,), (X, 7), "output[1]", "is int 7, which the original does not return"),
        ({"a": X}, {"b": X}, "output['a']", "is missing"),
        (Point(X, X), (X, X), "output", "is tuple of 2, expected Point of 2"),
        (True, 1, "output", "is int 1, expected bool True"),
        (1, 1.0, "output", "is float 1.0, expected int 1"),
        (3, 4, "output", "is int 4, expected int 3"),
        ("yes", "no", "output", "is str 'no', expected str 'yes'"),
        (torch.float32, torch.float64, "output", "is dtype torch.float64"),
        (torch.Size([2]), torch.Size([3]), "output", "is Size torch.Size([3])"),
        (slice(2), slice(3), "output", "is slice slice(None, 3, None)"),
    ],
)
def test_other_structure_or_values_fail_and_say_where(original: Any, transformed: Any, path: str, problem: str) -> None:
    report = compare(lambda x: original, lambda x: transformed, X)
    assert not report and report.worst is not None
    assert report.failures[0].path == path and (report.failures[0].problem or "").startswith(problem)
    with pytest.raises(VerificationError, match="What to do"):
        report.raise_if_failed()
    assert f"`{path}` of input 0 {problem}" in str(report)


@pytest.mark.parametrize("value", [None, True, "text", 1.5, math.nan, 2j, (), {}, torch.int8, {1, "a"}, range(3), ...])
def test_equal_values_of_any_kind_pass(value: Any) -> None:
    report = compare(lambda x: (value, x), lambda x: (copy.deepcopy(value), x), X)
    assert report and len(report.outputs) == 2


def test_python_floats_are_held_to_the_tolerance_of_float32() -> None:
    assert compare(lambda x: 1.0, lambda x: 1.000001, X) and not compare(lambda x: 1.0, lambda x: 1.01, X)
    assert compare(lambda x: 1.5, lambda x: 1.5, X).outputs[0].tolerance_source == "of float32"
    assert compare(lambda x: 1j, lambda x: 1.000001j, X) and not compare(lambda x: math.nan, lambda x: 1.0, X)


@pytest.mark.parametrize("dtype", [torch.int64, torch.uint8, torch.bool, torch.uint64])
def test_integers_and_booleans_have_to_be_equal(dtype: torch.dtype) -> None:
    a, b = torch.tensor([0, 1, 1]).to(dtype), torch.tensor([0, 1, 0]).to(dtype)
    assert compare(lambda x: (x, a), lambda x: (x, a.clone()), X)
    report = compare(lambda x: a, lambda x: b, X)
    assert report.outputs[0].sqnr_db is None and report.outputs[0].tolerance is None
    with pytest.raises(VerificationError, match=r"worst at \[2\]: found (0|False), expected (1|True) exactly that"):
        report.raise_if_failed()


# --- The report


def test_the_worst_output_is_named_with_its_numbers() -> None:
    report = compare(lambda x: (x, x), lambda x: (x + 0.01, x - 1), X)
    assert report.worst is report.outputs[1] and len(report.failures) == 2
    with pytest.raises(VerificationError) as caught:
        report.raise_if_failed(pass_name="fold", index=2)
    message = str(caught.value)
    assert (caught.value.pass_name, caught.value.index) == ("fold", 2)
    for part in ("pass `fold`", "`output[1]` of input 0", "max absolute error 1,", "What to do", "2 of 2"):
        assert part in message, message


def test_the_table_has_a_line_for_each_output() -> None:
    def nested(x: Tensor, value: int = 1) -> Any:
        return x, value, 0.5

    report = verify(Calls(nested), Calls(nested), [X, X])
    lines = str(report).splitlines()
    assert lines[0] == "passed: 2 tensors and 4 other values compared, none differs" and len(lines) == 6
    assert lines[1].split()[:2] == ["input", "output"] and lines[4].split()[:2] == ["1", "output[0]"]
    wrong = str(compare(nested, lambda x: nested(x, 2), X))
    assert wrong.startswith("FAILED: 1 tensor and 2 other values compared, 1 of them wrong\n") and "output[1]" in wrong
    nothing = str(compare(lambda x: None, lambda x: None, X))
    assert nothing.startswith(
        "FAILED: 1 other value compared, none differs\nfailed: the verification saw nothing: none"
    )
    assert not any(line.endswith(" ") for line in lines)
    assert "input" not in str(verify(nn.ReLU(), nn.ReLU(), X)).splitlines()[1]  # there is but one


# --- Whatever the values


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-1e6, 1e6, width=32), min_size=1, max_size=20), st.data())
def test_a_changed_element_is_found_wherever_it_is(values: list[float], data: st.DataObject) -> None:
    place = data.draw(st.integers(0, len(values) - 1))
    x = torch.tensor(values)
    shift = 1 + 0.01 * x.abs().max()
    wrong = torch.arange(len(values)) == place
    other = data.draw(st.sampled_from([torch.tensor(math.nan), torch.tensor(math.inf), x[place] + shift]))
    assert not compare(lambda x: x, lambda x: torch.where(wrong, other, x), x)
