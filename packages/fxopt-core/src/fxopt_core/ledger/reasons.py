"""What the codes of refusals mean: each pass declares its own as ``reasons``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fxopt_core.ledger.records import Record
from fxopt_core.names import known_class

GENERAL: dict[str, str] = {}
"""Meaning and remedy of the reason codes that any pass may give; fxopt-rewrite fills it."""

_SHOWN = 20


def meaning(reason: str, record: Record) -> str:
    """Return what a reason code in a record means and what to do; "" if neither the pass nor `GENERAL` has it.

    The class of the pass is not imported: a record may come from a file.
    """
    declared: Mapping[str, str] = getattr(known_class(record.transformation), "reasons", {})
    return declared.get(reason) or GENERAL.get(reason, "")


def refusals_text(records: Iterable[Record]) -> str:
    """List refused sites, one a line: up to 20, with at least one for each reason, then the remedies.

    >>> from fxopt_core import Refusal
    >>> refusals = tuple(Refusal(f"k{i}", "lazy", f"module `k{i}` is lazy") for i in range(22))
    >>> print(refusals_text([Record("fold", "m:Fold", (), "", refusals=refusals[18:])]))
      k18: lazy: module `k18` is lazy
      k19: lazy: module `k19` is lazy
      k20: lazy: module `k20` is lazy
      k21: lazy: module `k21` is lazy
      What to do for lazy: The module is lazy and has no weights yet. Run the model once before capturing it.
    """
    listed = [(record, refusal) for record in records for refusal in record.refusals]
    firsts = {refusal.reason: refusal for _, refusal in reversed(listed)}
    others = [refusal for _, refusal in listed if refusal is not firsts[refusal.reason]]
    shown = [*firsts.values(), *others][: max(_SHOWN, len(firsts))]
    lines = [f"{refusal.site}: {refusal.reason}: {refusal.message}" for refusal in shown]
    if len(listed) > len(shown):
        lines.append(f"and {len(listed) - len(shown)} more")
    meanings = {refusal.reason: meaning(refusal.reason, record) for record, refusal in listed}
    lines += [f"What to do for {reason}: {text}" for reason, text in meanings.items() if text]
    return "\n".join(f"  {line}" for line in lines)
