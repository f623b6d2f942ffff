"""Bounds of differences: by the dtype, as the caller states, or as approximating passes promise."""

from __future__ import annotations

import math
import numbers
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.fx import GraphModule

from fxopt_core import (
    PreconditionError,
    Record,
    Transformation,
    known_class,
    ledger_of,
    registry,
)
from fxopt_tools.verification.isolated_run import ONE_AT_A_TIME


@dataclass(frozen=True)
class Bounds:
    """The bounds that a caller or passes set in place of the tolerance of the dtype.

    Attributes:
        rtol: relative tolerance, or None for the dtype's.
        atol: absolute tolerance, or None for the dtype's.
        sqnr: the lowest signal-to-noise ratio in dB, which replaces both tolerances; None if they apply.
        source: where the ratio comes from: "as stated", or "promised by fuse-linears".
    """

    rtol: float | None = None
    atol: float | None = None
    sqnr: float | None = None
    source: str = "as stated"

    @property
    def stated(self) -> bool:
        """Whether anything replaces the tolerance of the dtype."""
        return self != UNSTATED

    def between(self, before: Iterable[Record], after: Iterable[Record]) -> Bounds:
        """Return the bounds for two states of a model, given the records of the passes that led to each.

        If nothing is stated, approximating passes that were applied to only one of the two are held to their promises
        (`fxopt_core.Transformation.promised_sqnr`). The noise of several adds up: two that promise 40 dB keep 37 dB
        together. A pass that ran several times counts once, since it promises the same for any number of sites.
        """
        if self.stated:
            return self
        both = [[each for each in records if each.state == "applied" and each.changed] for records in (before, after)]
        one, other = (Counter(map(_identity, records)) for records in both)
        # Counters: a pass that both states had equally often cancels out, and is no reason for a difference.
        differ = {**(one - other), **(other - one)}
        made = {_identity(record): record for records in both for record in records if _identity(record) in differ}
        stated = ((record.pass_name, promise_of(record)) for record in made.values())
        promises = {(name, promised) for name, promised in stated if promised is not None}
        if not promises:
            return self
        # Decibels are logarithms of powers, and powers of independent noises add up.
        noise = sum(10 ** (-promised / 10) for _, promised in promises)
        names = " and ".join(sorted({name for name, _ in promises}))
        return Bounds(sqnr=-10 * math.log10(noise), source=f"promised by {names}")


UNSTATED = Bounds()


def read_bounds(rtol: float | None, atol: float | None, sqnr: float | None = None) -> Bounds:
    """Return the bounds that a caller gives.

    Raises:
        PreconditionError: One is negative, infinite or not a number, or a ratio is given together with a tolerance.
    """
    for name, value in {"rtol": rtol, "atol": atol, "sqnr": sqnr}.items():
        if value is not None and not _is_amount(value):
            raise PreconditionError(f"{name} is {value!r}, expected a finite number from 0, or None for the default")
    if sqnr is not None and (rtol, atol) != (None, None):
        raise PreconditionError(
            f"sqnr={sqnr} is given together with rtol={rtol} and atol={atol}, expected either a ratio for "
            "whole outputs or tolerances for single elements"
        )
    return Bounds(rtol, atol, sqnr)


def records_of(module: nn.Module) -> tuple[Record, ...]:
    """Return the records of all passes that were applied to a module or to graph modules in it."""
    records: list[Record] = []
    with ONE_AT_A_TIME:
        modules = [*module.modules()]
    for each in modules:
        if isinstance(each, GraphModule):
            records += ledger_of(each).records
    return tuple(records)


def _is_amount(value: Any) -> bool:
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    return is_number and 0 <= value < math.inf


def _identity(record: Record) -> tuple[str, str, str]:
    return record.transformation, record.pass_name, record.signature


def promise_of(record: Record) -> float | None:
    """Return the signal-to-noise ratio, in dB, that a recorded pass promises with its options; None if it does not.

    A pass that cannot be made here from its record promises nothing.
    """
    if known_class(record.transformation) is None:
        registry().available()  # plugins are imported on first use
    cls = known_class(record.transformation)
    if cls is None or not issubclass(cls, Transformation):
        return None
    try:
        made: object = cls(**dict(record.options))
    except Exception:  # for example, options of another version: use the promise of the class
        made = cls
    promised = getattr(made, "promised_sqnr", None)
    return promised if _is_amount(promised) else None
