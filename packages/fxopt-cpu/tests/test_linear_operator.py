"""`torch.ops.fxopt.linear` against its reference in float64, for every instruction set of this processor."""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings, strategies as st
from packed_bytes import pack_bytes
from thread_counts import threads
from torch import Tensor

import fxopt_cpu
from fxopt_cpu import library
from fxopt_cpu.operators.linear import (
    ACTIVATIONS,
    LINEAR,
    activate,
    normalize,
    pack,
    quantize,
    shifted_sums,
    unpack,
)

FORMATS = ("float32", "bfloat16", "int8")
built = pytest.mark.skipif(library.isa() is None, reason="the library was not built: there was no C++ compiler")


@pytest.fixture
def isa(instructions: str) -> str:
    """Each instruction set in turn."""
    if instructions == "none":
        pytest.skip("the library was not built: there was no C++ compiler")
    return instructions


class Case(NamedTuple):
    """A product, with everything else the operator takes."""

    input: Tensor
    panels: Tensor
    scale: Tensor | None
    sums: Tensor | None
    bias: Tensor | None
    features: int
    activation: int = 0
    alpha: float = 0.0
    beta: float = 0.0
    residual: Tensor | None = None
    norm: int = 0
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    eps: float = 1e-5
    gated: bool = False
    rounding: Tensor | None = None

    def run(self) -> Tensor:
        """The operator's result."""
        result = torch.ops.fxopt.linear(*self)
        assert isinstance(result, Tensor)
        return result

    def expected(self) -> Tensor:
        """The reference's result, in float64."""
        wide = [
            value.double() if name in WIDE and value is not None else value for name, value in self._asdict().items()
        ]
        result = LINEAR.reference(*wide)
        assert isinstance(result, Tensor)
        return result


WIDE = ("input", "bias", "residual", "norm_weight", "norm_bias")


def packed(weight: Tensor, form: str, gated: bool = False) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The panels of a weight, or of a gate's and its factor's, with scales and sums."""
    halves = weight.chunk(2) if gated else [weight]
    if form != "int8":
        return torch.cat([pack(half.to(getattr(torch, form))) for half in halves]), None, None
    panels, scale, sums = zip(*[pack_bytes(*quantize(half)) for half in halves], strict=True)
    return torch.cat(panels), torch.cat(scale), torch.cat(sums)


def rows_of(form: str, *shape: int) -> Tensor:
    """Random rows; for int8 such that their integers are exact: else a tie that is rounded otherwise is seen."""
    if form != "int8" or not shape[-1]:
        return torch.randn(shape)
    steps = torch.randint(-127, 128, shape).float()
    steps[..., 0] = 127
    return steps * 2.0 ** torch.randint(-9, 3, (*shape[:-1], 1))


SIZES = st.one_of(st.integers(1, 70), st.sampled_from([100, 127, 128, 255, 384, 512, 1023, 1024]))


@st.composite
def cases(draw: st.DrawFn, form: str) -> Case:
    """Products of many shapes."""
    rows, depth = draw(st.one_of(st.integers(0, 40), st.integers(41, 300))), draw(SIZES)
    features, gated, activation = draw(SIZES), draw(st.booleans()), draw(st.integers(0, len(ACTIVATIONS) - 1))
    torch.manual_seed(draw(st.integers(0, 1000)))
    all_features = features * 2 if gated else features
    input = rows_of(form, rows, depth + 5)[:, :depth] if draw(st.booleans()) else rows_of(form, rows, depth)
    weight = torch.randn(all_features, depth) / math.sqrt(depth)
    return Case(
        input,
        *packed(weight, form, gated),
        torch.randn(all_features) if draw(st.booleans()) else None,
        features,
        activation,
        *((-0.5, 0.75) if ACTIVATIONS[activation] == "hardtanh" else (0.3, 0.0)),
        residual=torch.randn(rows, features + 3)[:, 3:] if draw(st.booleans()) else None,
        gated=gated,
    )


@pytest.mark.parametrize("form", FORMATS)
def test_products_are_those_of_float64(isa: str, form: str) -> None:
    """Bias, activation, gate and residual included, whatever the sizes."""

    @settings(deadline=None, max_examples=settings().max_examples // 4)
    @given(cases(form))
    def check(case: Case) -> None:
        torch.testing.assert_close(case.run().double(), case.expected(), rtol=2e-5, atol=2e-5)

    check()


def test_norms_are_those_of_float64(isa: str) -> None:
    """Layer and RMS norm of the sum, with and without weight and bias."""
    for features in (1, 5, 16, 31, 100, 384):
        for kind, weighted, biased in ((1, True, True), (1, False, False), (2, True, False), (2, False, True)):
            weight = torch.randn(features) if weighted else None
            bias = torch.randn(features) if biased else None
            case = Case(torch.randn(17, 33), *packed(torch.randn(features, 33), "float32"), None, features)
            case = case._replace(residual=torch.randn(17, features))
            plain = case.run().double()
            wide = [each if each is None else each.double() for each in (weight, bias)]
            found = case._replace(norm=kind, norm_weight=weight, norm_bias=bias).run()
            torch.testing.assert_close(
                found.double(), normalize(plain, kind, wide[0], wide[1], 1e-5), rtol=1e-5, atol=1e-5
            )


def test_activations_are_right_to_the_last_digits(isa: str) -> None:
    """Over the whole range, also where one plus erf cancels."""
    sizes = torch.cat([torch.logspace(-38, 1.5, 3000), torch.linspace(0, 110, 4001)])
    values = torch.cat([sizes, -sizes]).view(-1, 1)
    for activation, name in enumerate(ACTIVATIONS):
        alpha, beta = (-0.5, 0.75) if name == "hardtanh" else (0.3, 0.0)
        found = Case(values, pack(torch.ones(1, 1)), None, None, None, 1, activation, alpha, beta).run().double()
        wide = values.double()
        expected = activate(wide, activation, alpha, beta)
        if name == "gelu":
            expected = wide * torch.special.erfc(-wide * math.sqrt(0.5)) / 2
        if name == "gelu_tanh":
            expected = wide * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
        # What a rounded argument of the exponential function changes in the tails.
        tail = 1 + wide.abs() ** {"gelu_tanh": 3, "gelu": 2, "quick_gelu": 1}.get(name, 0)
        error = (found - expected).abs() / (expected.abs() * tail + 1e-30)
        assert error.max() < 6e-7, f"{name}: {error.max():.1e} at {values[error.argmax()].item()}"


SPECIAL = torch.tensor([math.nan, math.inf, -math.inf, -0.0, 1e-40, -1e-45, 3e38, -3e38, 1e-30])


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("name", ["none", "relu", "silu", "tanh", "hardswish", "leaky_relu", "hardtanh"])
def test_nan_and_infinity_are_as_in_eager(isa: str, form: str, name: str) -> None:
    """In their rows, and in no other."""
    torch.manual_seed(0)
    rows = torch.randn(2 * len(SPECIAL), 37)
    rows[::2, 5] = SPECIAL
    weight = torch.randn(19, 37)
    weight[3, 5] = 0.0
    case = Case(rows, *packed(weight, form), torch.randn(19), 19, ACTIVATIONS.index(name), -1.0, 6.0)
    found = case.run()
    reference = LINEAR.reference(*case)
    for kind in (torch.isnan, torch.isposinf, torch.isneginf):
        assert torch.equal(kind(found), kind(reference)), kind.__name__
    ordinary = case._replace(input=rows[1::2].contiguous()).run()
    assert torch.equal(found[1::2], ordinary)
    mild = found.isfinite() & (reference.abs() < 1e6)
    torch.testing.assert_close(found[mild], reference[mild], rtol=1e-4, atol=0.2 if form == "int8" else 1e-4)


def test_tiny_rows_have_integers_too(isa: str) -> None:
    """One over a tiny scale is infinite; a row of zeros has no scale at all."""
    rows = torch.tensor([[1e-38, -5e-39], [1e-30, 1e-30], [0.0, -0.0], [1e-44, 0.0]])
    found = Case(rows, *packed(torch.tensor([[1e30, 1e30], [127.0, 0.0]]), "int8"), None, 2).run()
    assert found.isfinite().all()
    torch.testing.assert_close(found[:3, 0], (rows @ torch.tensor([1e30, 1e30]))[:3], rtol=0.02, atol=0)
    assert not found[2].any()


def test_rows_are_rounded_to_the_nearest_integer(isa: str) -> None:
    """A product with one is what is left of a number: half a step of its row's scale away at most."""
    rows = torch.randn(50, 64)
    found = Case(rows, *packed(torch.eye(64), "int8"), None, 64).run()
    assert ((found - rows).abs() <= rows.abs().amax(1, keepdim=True) / 127 * 0.5001).all()


@settings(deadline=None, max_examples=settings().max_examples // 6)
@given(st.integers(0, 40), SIZES, SIZES, st.booleans(), st.integers(0, 1000))
def rounded_by_ranges(rows: int, depth: int, features: int, gated: bool, seed: int) -> None:
    torch.manual_seed(seed)
    # Powers of two and whole numbers: no result lies between two integers.
    rounding = torch.stack((2.0 ** torch.randint(-2, 4, (depth,)), torch.randint(-300, 300, (depth,)).float()))
    input = torch.randint(-200, 200, (rows, depth)) / rounding[0] - rounding[1] / rounding[0]
    panels, scale, sums = packed(torch.randn(2 * features if gated else features, depth), "int8", gated)
    assert sums is not None
    sums = torch.cat((sums, shifted_sums(panels, rounding[1])))
    case = Case(input, panels, scale, sums, None, features, gated=gated, rounding=rounding)
    torch.testing.assert_close(case.run().double(), case.expected(), rtol=1e-5, atol=1e-4)


def test_rows_are_rounded_by_given_factors_and_shifts(isa: str) -> None:
    """What is larger than the ranges is cut off; NaN and infinity are as in eager."""
    rounded_by_ranges()
    factors = torch.stack((torch.full((64,), 127.0), torch.zeros(64)))
    panels, scale, sums = packed(torch.eye(64), "int8")
    assert sums is not None
    rows = torch.randn(50, 64)
    case = Case(rows, panels, scale, torch.cat((sums, shifted_sums(panels, factors[1]))), None, 64, rounding=factors)
    weight = Case(torch.eye(64), panels, scale, sums, None, 64).run().diagonal()
    torch.testing.assert_close(case.run() / weight / 127, rows.clamp(-1, 1), rtol=0, atol=0.5001 / 127)
    rows[3, 5], rows[4, 6] = math.nan, math.inf
    found = case.run()
    assert found[3].isnan().all()
    assert found[4, 6] == math.inf
    assert found[5:].isfinite().all()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("gated", [False, True])
def test_a_row_does_not_depend_on_the_others(isa: str, form: str, gated: bool) -> None:
    """Its bits are those it has alone, whatever the number of rows and threads."""
    torch.manual_seed(0)
    rows, residual = torch.randn(300, 512), torch.randn(300, 200)
    rows[7] *= 1e4
    weight = torch.randn(400 if gated else 200, 512)
    case = Case(rows, *packed(weight, form, gated), None, 200, 2, residual=residual, norm=1, gated=gated)
    alone = torch.cat([case._replace(input=rows[i : i + 1], residual=residual[i : i + 1]).run() for i in range(40)])
    for count in (1, 2):
        with threads(count):
            for size in (2, 3, 5, 8, 15, 16, 29, 40, 300):
                part = case._replace(input=rows[:size], residual=residual[:size]).run()
                assert torch.equal(part[:40], alone[:size]), (count, size)


def test_rows_are_read_where_they_lie(isa: str) -> None:
    """Views and expanded rows, rows of one stride, and others; of the residual and vectors too."""
    weight = torch.randn(20, 24)
    panels, bias = pack(weight), torch.randn(40)[::2]
    whole = torch.randn(6, 5, 48)
    inputs = [
        whole[..., 24:],
        whole[:, 1:4, :24],  # no stride for all rows
        whole[:, :1, :24],
        whole[..., ::2],
        torch.randn(24, 7).t(),
        torch.randn(1, 24).expand(9, 24),
        torch.randn(24),
        torch.randn(2, 3, 0, 24),
        torch.empty(4, 8, 24).random_(-3, 3)[::2, ::3],
    ]
    for input in inputs:
        residual = torch.randn(20, *input.shape[:-1]).movedim(0, -1)
        found = Case(input, panels, None, None, bias, 20, residual=residual).run()
        assert found.is_contiguous()
        torch.testing.assert_close(
            found, torch.nn.functional.linear(input, weight, bias) + residual, rtol=1e-5, atol=1e-5
        )
    nothing = Case(torch.randn(3, 0), pack(torch.randn(20, 0)), None, None, bias, 20).run()
    assert torch.equal(nothing, bias.expand(3, 20))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_packing_keeps_every_bit(dtype: torch.dtype) -> None:
    """Signs of zeros and NaN included."""
    for features, depth in ((1, 1), (16, 4), (17, 7), (50, 384), (3, 0)):
        words = torch.randint(-(2**31), 2**31 - 1, (features, depth), dtype=torch.int64).to(torch.int32)
        weight = words.view(dtype) if dtype == torch.float32 else words.to(torch.int8).to(dtype)
        integers = torch.int32 if dtype == torch.float32 else torch.int16 if dtype == torch.bfloat16 else torch.int8
        assert torch.equal(unpack(pack(weight), features, depth).view(integers), weight.view(integers))


GOOD = Case(torch.randn(4, 24), *packed(torch.randn(20, 24), "int8"), torch.randn(20), 20)
BAD: list[tuple[dict[str, Any], str]] = [
    ({"input": torch.randn(4, 24).double()}, "input is Double, expected Float"),
    ({"input": torch.randn(4, 23, 25)}, r"panels have shape \(2, 6, 16, 4\), expected \(2, 7, 16, 4\)"),
    ({"panels": torch.randn(2, 24, 16, dtype=torch.float64)}, "panels is Double, expected Float"),
    ({"panels": torch.randn(2, 24)}, r"panels have shape \(2, 24\), expected \(2, 24, 16\)"),
    ({"panels": torch.randn(16, 24, 2).transpose(0, 2)}, "contiguous"),
    ({"features": 40}, r"expected \(3, 6, 16, 4\), contiguous, for 40 features"),
    ({"gated": True}, "gated"),
    ({"scale": None}, "panels of int8 need scale and sums"),
    ({"scale": torch.ones(20)}, r"scale has shape \(20\), expected 32 elements"),
    ({"sums": torch.ones(32)}, "sums is Float, expected Int"),
    ({"bias": torch.ones(21)}, r"bias has shape \(21\), expected 20 elements"),
    ({"residual": torch.ones(5, 20)}, r"residual has shape \(5, 20\), expected \(4, 20\)"),
    ({"activation": 14}, "activation is 14"),
    ({"rounding": torch.ones(2, 23), "sums": torch.ones(64, dtype=torch.int32)}, r"rounding has shape \(2, 23\)"),
    ({"rounding": torch.ones(2, 24), "panels": pack(torch.randn(20, 24))}, "only panels of int8"),
    ({"input": torch.randn(4, 70000), "panels": torch.ones(2, 17500, 16, 4).char()}, "int8 sums hold 65536"),
]


@built
@pytest.mark.parametrize(("change", "message"), BAD, ids=[message for _, message in BAD])
def test_wrong_operands_are_named(change: dict[str, Any], message: str) -> None:
    """With what was found and expected."""
    with pytest.raises(RuntimeError, match=message):
        GOOD._replace(**change).run()


PROGRAM = """
import os, sys, torch

def portable():
    os.environ["FXOPT_KERNELS_ISA"] = "portable"
    import fxopt_cpu
    print("portable:", fxopt_cpu.isa())

def unknown():
    os.environ["FXOPT_KERNELS_ISA"] = "sse"
    try:
        import fxopt_cpu
    except ValueError as error:
        print("unknown:", error)

def without_the_library():
    sys.path.insert(0, sys.argv[1])
    import fxopt_cpu
    from fxopt_cpu.operators.linear import pack
    rows, weight = torch.randn(3, 5), torch.randn(4, 5)
    rest = None, None, None, 4, 0, 0.0, 0.0, None, 0, None, None, 0.0, False, None
    torch.testing.assert_close(torch.ops.fxopt.linear(rows, pack(weight), *rest), rows @ weight.t())
    print("without:", fxopt_cpu.isa())

for case in (portable, unknown, without_the_library):
    if not (child := os.fork()):  # each imports fxopt_cpu anew, and torch is there already
        case()
        sys.stdout.flush()
        os._exit(0)
    os.waitpid(child, 0)
"""


@built
def test_the_library_is_chosen_at_import(tmp_path: Path) -> None:
    """The environment lowers the instruction set; without a library, as without a compiler, the reference computes."""
    package = Path(fxopt_cpu.__file__).parent
    shutil.copytree(package, tmp_path / package.name, ignore=shutil.ignore_patterns("_kernels.so", "__pycache__"))
    command = [sys.executable, "-c", PROGRAM, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    names = "portable, avx2, avxvnni, avx512, avx512vnni, avx512bf16, amx"
    assert done.stdout.splitlines() == [
        "portable: portable",
        f"unknown: FXOPT_KERNELS_ISA is 'sse', expected one of {names}",
        "without: None",
    ], done.stderr
