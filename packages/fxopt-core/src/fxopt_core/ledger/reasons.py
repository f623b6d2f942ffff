"""What the codes of refusals mean: each pass declares its own as ``reasons``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping

from fxopt_core.ledger.records import Record, Refusal
from fxopt_core.values.names import known_class

GENERAL: dict[str, str] = {}
"""Reason code to meaning and remedy, of codes that any pass may give; fxopt-rewrite fills it."""

_SHOWN = 20


def meaning(reason: str, record: Record) -> str:
    """Return what a reason code in a record means and what to do; "" where neither the pass nor `GENERAL` has it.

    The class of the pass is not imported: a record may come from a file.
    """
    declared: Mapping[str, str] = getattr(known_class(record.transformation), "reasons", {})
    return declared.get(reason) or GENERAL.get(reason, "")


def refusals_text(records: Iterable[Record]) -> str:
    """Return what was refused, a line each: up to 20 sites, with at least one for each reason, then what to do.

    >>> from fxopt_core import Record, Refusal
    >>> refusals = tuple(Refusal(f"k{i}", "lazy", f"module `k{i}` is lazy") for i in range(22))
    >>> print(refusals_text([Record("fold", "m:Fold", (), "", refusals=refusals[18:])]))
      k18: lazy: module `k18` is lazy
      k19: lazy: module `k19` is lazy
      k20: lazy: module `k20` is lazy
      k21: lazy: module `k21` is lazy
      What to do for lazy: The module is lazy and has no weights yet. Run the model once before capturing it.
    """
    meanings: dict[str, str] = {}
    refusals: list[Refusal] = []
    for record in records:
        refusals += record.refusals
        meanings |= {refusal.reason: meaning(refusal.reason, record) for refusal in record.refusals}
    counts = Counter(refusal.reason for refusal in refusals)
    first = {refusal.reason: place for place, refusal in reversed(list(enumerate(refusals)))}
    others = (place for place in range(len(refusals)) if place not in first.values())
    shown = sorted([*first.values(), *others][: max(_SHOWN, len(first))])
    lines = [f"{refusals[place].site}: {refusals[place].reason}: {refusals[place].message}" for place in shown]
    left = counts - Counter(refusals[place].reason for place in shown)
    if left:
        lines.append(f"and {left.total()} more: {', '.join(f'{n} for {reason}' for reason, n in left.most_common())}")
    lines += [f"What to do for {reason}: {meanings[reason]}" for reason, _ in counts.most_common() if meanings[reason]]
    return "\n".join(f"  {line}" for line in lines)
