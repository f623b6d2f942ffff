"""The comparison with peers judges rightly: what is wrong, raises or breaks a promise is counted as that."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from benchmarks.cases import Case
from benchmarks.contenders import FXOPT, FXOPT_CAPTURED, Contender
from benchmarks.correctness import all_cases, judge, one_of_each
from nightly import mostly_nightly
from torch import nn

from benchmarks import promises

CASES = all_cases()
FIRST = one_of_each((case.family, case) for case in CASES)


def titled(case: Case) -> str:
    """What a case is called in the output of tests."""
    return case.title


def twice(model: nn.Module, case: Case) -> Any:
    """A contender that is wrong."""
    return lambda *inputs: 2 * model(*inputs)


def raising(model: nn.Module, case: Case) -> Any:
    """A contender that raises."""
    raise NotImplementedError


def alone(model: nn.Module, case: Case) -> Any:
    """A contender that does nothing."""
    return torch.fx.symbolic_trace(model)


def compiling(model: nn.Module, case: Case) -> Any:
    """A contender whose result nobody can look into."""
    return lambda *inputs: model(*inputs)


@pytest.mark.parametrize("case", FIRST, ids=titled)
def test_verdicts(case: Case) -> None:
    assert judge(Contender("wrong", twice), case).kind == "wrong"
    assert judge(Contender("raises", raising), case).detail == "NotImplementedError"
    assert judge(Contender("idle", alone), case).kind == "left alone"
    assert judge(Contender("compiles", compiling), case).kind == "compiled"


@pytest.mark.parametrize("case", mostly_nightly(CASES, {case.title for case in (*FIRST, *CASES[::3])}, titled))
def test_fxopt_computes_every_case_right(case: Case) -> None:
    """By rewriting the trace, or by leaving it alone."""
    assert judge(FXOPT, case).right


@pytest.mark.parametrize("case", FIRST, ids=titled)
def test_fxopt_keeps_promises(case: Case) -> None:
    for promise in promises.PROMISES.values():
        assert promises.kept_in(promise, FXOPT, case) in (True, None)


@pytest.mark.parametrize("case", FIRST, ids=titled)
def test_fxopt_computes_a_capture_right(case: Case) -> None:
    assert judge(FXOPT_CAPTURED, case).kind == "rewritten"
