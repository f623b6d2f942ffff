"""Which contender computes what the model does: fxopt and its peers on generated adversarial cases."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import dataclass
from io import StringIO
from typing import Literal, cast

import torch
from torch import Tensor
from torch.fx import GraphModule

from benchmarks import promises
from benchmarks.cases import FAMILIES, Case
from benchmarks.cases_division import division_cases
from benchmarks.cases_linear import bias_cases, merging_cases
from benchmarks.cases_norm import convolution_cases, linear_cases
from benchmarks.contenders import (
    COMPILERS,
    FUSE,
    FXOPT,
    FXOPT_CAPTURED,
    OPTIMUM,
    Contender,
    is_inference_in_float32,
    is_norm,
    missing,
    rewrote,
)
from benchmarks.suite import Absent, Cell, Row, Settings, Table
from fxopt_core import history

Kind = Literal["rewritten", "left alone", "compiled", "wrong", "raises"]
TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}
"""The largest allowed error, relative to the largest element; other values than floats have to be equal."""
REWRITERS = (FXOPT, FXOPT_CAPTURED, OPTIMUM, FUSE)


@dataclass(frozen=True)
class Verdict:
    """The result of a contender on a case.

    Attributes:
        kind: right by a rewrite, right because the model was left alone, right in a program that nobody can look into,
            wrong, or an error instead of a result.
        detail: the largest relative error, or the error's type.
    """

    kind: Kind
    detail: str = ""

    @property
    def right(self) -> bool:
        """Whether the final module computes what the model does."""
        return self.kind in ("rewritten", "left alone", "compiled")


Verdicts = Mapping[str, Mapping[Case, Verdict]]
"""Results by contender; cases that do not apply to it are missing."""


def all_cases() -> list[Case]:
    """Every case, in the order of the families."""
    return [*convolution_cases(), *linear_cases(), *merging_cases(), *bias_cases(), *division_cases()]


def tables(settings: Settings) -> Iterator[Table]:
    """Judge all contenders on all cases."""
    cases = all_cases()
    if settings.quick:
        cases = one_of_each((case.family, case) for case in cases)
    verdicts = {each.name: judged(each, cases) for each in REWRITERS}
    absent = {each.name: reason for each in (*REWRITERS, *COMPILERS) if (reason := missing(each)) is not None}
    yield by_family(cases, verdicts, absent)
    yield by_topic(cases, verdicts, absent)
    yield missed(cases, verdicts)
    yield promises.table(cases, [each for each in (FXOPT, OPTIMUM, FUSE) if each.name not in absent])
    folds = [case for case in cases if is_norm(case) and is_inference_in_float32(case)]
    chosen = one_of_each(((case.family, case.topic), case) for case in folds)
    compilers = COMPILERS[:1] if settings.quick else COMPILERS
    compiled = {each.name: judged(each, chosen) for each in (FXOPT_CAPTURED, *compilers)}
    yield by_family(chosen, compiled, absent, title="Compilers of whole programs", text=COMPILERS_TEXT)


def one_of_each(cases: Iterable[tuple[object, Case]]) -> list[Case]:
    """The first case of every key."""
    found: dict[object, Case] = {}
    for key, case in cases:
        found.setdefault(key, case)
    return list(found.values())


def judged(contender: Contender, cases: Sequence[Case]) -> dict[Case, Verdict]:
    """The results of a contender on the cases that apply to it; nothing where it is not installed."""
    if missing(contender) is not None:
        return {}
    return {case: judge(contender, case) for case in cases if contender.applies(case)}


def judge(contender: Contender, case: Case) -> Verdict:
    """Rewrite the case's model, and compare it on all inputs with another instance, which was left alone."""
    original = case.build()
    try:
        with redirect_stderr(StringIO()):  # torch prints the code of a graph that raises
            result = contender.rewrite(case.build(), case)
            errors = [compared(original, result, inputs) for inputs in case.inputs()]
    except Exception as error:  # a contender may raise anything
        return Verdict("raises", type(error).__name__)
    worst = max(errors)
    if worst > 1:
        return Verdict("wrong", f"{worst:.3g}")
    if not isinstance(result, GraphModule):
        return Verdict("compiled")
    return Verdict("rewritten" if rewrote(result, case) else "left alone")


def compared(original: Callable[..., object], result: Callable[..., object], inputs: Sequence[Tensor]) -> float:
    """The largest error in units of what is allowed: more than 1 is wrong."""
    with torch.no_grad():
        expected, found = (each(*(tensor.clone() for tensor in inputs)) for each in (original, result))
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return math.inf
    if expected.shape != found.shape or expected.dtype != found.dtype:
        return math.inf
    return error_of(expected, found)


def error_of(expected: Tensor, found: Tensor) -> float:
    """The largest error relative to the largest finite element, in units of the dtype's tolerance.

    NaN equals NaN, and an infinity itself; anything else in their place is infinitely wrong.
    """
    if not expected.numel():
        return 0.0
    a, b = expected.double(), found.double()
    different = ~((a == b) | (a.isnan() & b.isnan()))
    if expected.dtype not in TOLERANCES:
        return math.inf if different.any() else 0.0
    error = torch.where(different, (a - b).abs(), 0.0)
    if not error.isfinite().all():
        return math.inf
    size = torch.where(a.isfinite(), a.abs(), 0.0).max().item()
    largest: float = error.max().item()
    return largest / (size * TOLERANCES[expected.dtype]) if size else (math.inf if largest else 0.0)


def by_family(
    cases: Sequence[Case],
    verdicts: Verdicts,
    absent: Mapping[str, Absent],
    title: str = "Computed right, by rewrite",
    text: str = "",
) -> Table:
    """How many of a family's cases each contender computes right, and how many of these it rewrote."""
    families = [family for family in FAMILIES if any(case.family == family for case in cases)]
    rows = []
    for family in [*families, "all"]:
        chosen = [case for case in cases if family in (case.family, "all")]
        cells: list[Cell] = [absent.get(name) or counted(found, chosen) for name, found in verdicts.items()]
        rows.append(Row(family, (len(chosen), *cells)))
    return Table(title, ("rewrite", "cases", *verdicts), tuple(rows), text or FAMILY_TEXT)


def counted(verdicts: Mapping[Case, Verdict], cases: Iterable[Case]) -> Cell:
    """Cases that are right, of those that apply; of these, what was rewritten; and what raised instead."""
    found = [verdicts[case] for case in cases if case in verdicts]
    if not found:
        return "-"
    kinds = Counter(verdict.kind for verdict in found)
    right = sum(verdict.right for verdict in found)
    notes = [] if kinds["compiled"] else [f"{kinds['rewritten']} rewritten"]
    notes += [f"{kinds['wrong']} wrong"] if kinds["wrong"] else []
    notes += [f"{kinds['raises']} raise"] if kinds["raises"] else []
    return f"{right} of {len(found)}" + (f" ({', '.join(notes)})" if notes else "")


def by_topic(cases: Sequence[Case], verdicts: Verdicts, absent: Mapping[str, Absent]) -> Table:
    """The topics in which some contender fails a case."""
    rows = []
    for family in FAMILIES:
        for topic in dict.fromkeys(case.topic for case in cases if case.family == family):
            chosen = [case for case in cases if (case.family, case.topic) == (family, topic)]
            if all(found[case].right for found in verdicts.values() for case in chosen if case in found):
                continue
            cells = [absent.get(name) or short(found, chosen) for name, found in verdicts.items()]
            rows.append(Row(f"{family}: {topic}", tuple(cells)))
    return Table("What goes wrong, by topic", ("case", *verdicts), tuple(rows), TOPIC_TEXT)


def short(verdicts: Mapping[Case, Verdict], cases: Iterable[Case]) -> Cell:
    """The number right of all, and what the others are: wrong, or the errors raised."""
    found = [verdicts[case] for case in cases if case in verdicts]
    if not found:
        return "-"
    right = sum(verdict.right for verdict in found)
    others = Counter("wrong" if verdict.kind == "wrong" else verdict.detail for verdict in found if not verdict.right)
    return f"{right} of {len(found)}" + (f" ({', '.join(others)})" if others else "")


def missed(cases: Iterable[Case], verdicts: Verdicts) -> Table:
    """Cases that fxopt leaves alone, and a peer rewrites correctly."""
    peers = [each.name for each in (OPTIMUM, FUSE) if verdicts[each.name]]
    rows: dict[tuple[str, str], Counter[str]] = {}
    for case in cases:
        better = [name for name in peers if case in verdicts[name] and verdicts[name][case].kind == "rewritten"]
        if better and verdicts[FXOPT.name][case].kind == "left alone":
            label = f"{case.family}: {case.topic}", reason(case)
            rows.setdefault(label, Counter()).update(better)
    columns = ("case", "fxopt's reason", *peers)
    lines = [Row(label, (why, *(str(found[name] or "-") for name in peers))) for (label, why), found in rows.items()]
    return Table("Where a peer rewrites more", columns, tuple(lines), MISSED_TEXT)


def reason(case: Case) -> str:
    """The code with which fxopt refuses the case's first site."""
    records = history(cast(GraphModule, FXOPT.rewrite(case.build(), case)))
    return next((refusal.reason for record in records for refusal in record.refusals), "no site")


FAMILY_TEXT = """Small adversarial models, generated by combining biases, missing affine parameters, half precision, \
hooks, shared weights, keyword calls, in-place changes, other ranks and training mode. Each tool rewrites its own \
copy, which is then called at several sizes. **Right** means the same shape and dtype, within 1e-4 (bfloat16: 5e-2, \
float16: 1e-2) of the largest element. Errors are not right; models left alone are, so the number of rewritten cases \
is shown too. The share says how badly things can go, not how often they do."""
TOPIC_TEXT = """Topics in which any tool is not right in every case."""
MISSED_TEXT = """Cases that fxopt leaves alone and that another tool rewrites correctly on these inputs: some where \
fxopt is cautious (a weight with two owners could be copied), some correct by luck (a product rounds differently \
than the quotient)."""
COMPILERS_TEXT = """The first float32 case of each batch-norm topic in evaluation mode, for compilers that fold. \
They return a program that cannot be edited or undone; `torch.jit` traces it at one size."""
