"""What the codes of refusals mean: each pass declares its own as ``reasons``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from fxopt_core.ledger.records import Record
from fxopt_core.names import known_class

#: Meaning and remedy of the reason codes that any pass may give; fxopt-rewrite fills it.
GENERAL: dict[str, str] = {}

_SHOWN = 20


def meaning(reason: str, record: Record) -> str:
    """Return what a reason code in a record means and what to do; "" if neither the pass nor `GENERAL` has it.

    The class of the pass is not imported: a record may come from a file.
    """
    declared: Mapping[str, str] = getattr(known_class(record.transformation), "reasons", {})
    return declared.get(reason) or GENERAL.get(reason, "")


def refusals_text(records: Iterable[Record]) -> str:
    """List refused sites, one a line, up to 20, then the remedies of all.

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
    lines = [f"{refusal.site}: {refusal.reason}: {refusal.message}" for _, refusal in listed[:_SHOWN]]
    if len(listed) > _SHOWN:
        lines.append(f"and {len(listed) - _SHOWN} more")
    meanings = {refusal.reason: meaning(refusal.reason, record) for record, refusal in listed}
    lines += [f"What to do for {reason}: {text}" for reason, text in meanings.items() if text]
    return "\n".join(f"  {line}" for line in lines)
