"""What a report tells of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fxopt.reporting.pictures import Picture
from fxopt_core import Record
from fxopt_tools import Size, Statistics, Timing, VerificationReport


@dataclass(frozen=True)
class Contents:
    """All that stands in a report.

    Attributes:
        title: its heading.
        picture: the graphs.
        records: the passes that ran, oldest first.
        after: size of the transformed module.
        before: size of the original, or None where it is not known.
        verification: what comparing the outputs gave.
        timing: times of the passes.
        statistics: what the passes did, in numbers.
        speed: seconds of calls, by what was called; the first is the original.
    """

    title: str
    picture: Picture
    records: tuple[Record, ...]
    after: Size
    before: Size | None = None
    verification: VerificationReport | None = None
    timing: Timing | None = None
    statistics: Statistics | None = None
    speed: Mapping[str, Sequence[float]] = field(default_factory=dict)
