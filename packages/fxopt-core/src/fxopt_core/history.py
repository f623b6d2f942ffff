"""`History`: the records of a graph module, which print as a table and write themselves as JSON."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fxopt_core.ledger import Record, Refusal, Rewrite

HISTORY_VERSION = 1
"""Raised when scripts that read `History.to_json` would have to change."""

_COLUMNS = ("run", "pass", "options", "state", "rewritten", "refused", "ms")
_NUMBERS = frozenset({"rewritten", "refused", "ms"})
_SHOWN = 50


class History(tuple["Record", ...]):
    """The records of all that was applied to a graph module, oldest first: a tuple of them.

    ``print`` shows a table: one line for each pass, and beneath it the sites that it rewrote and those that it left
    alone, each with its reason. The run is a number; passes of one composition share it and have their place behind it.

    >>> import torch
    >>> from fxopt_core import LintAndRecompile, history
    >>> records = history(LintAndRecompile()(torch.fx.symbolic_trace(torch.nn.ReLU())))
    >>> records
    (Record(pass_name='lint-and-recompile', ...),)
    >>> print(records)
    run  pass                options  state    rewritten  refused   ms
    0    lint-and-recompile           applied          0        0  ...
    """

    __slots__ = ()

    def __str__(self) -> str:
        """Return the table."""
        if not self:
            return "nothing was applied"
        rows = [_COLUMNS, *map(_cells, self)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [_line(_COLUMNS, widths)]
        for record, row in zip(self, rows[1:], strict=True):
            lines += [_line(row, widths), *_sites(record)]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        """Return the table for a notebook."""
        return f"<pre>{html.escape(str(self))}</pre>"

    def to_json(self, *, indent: int | None = None) -> str:
        """Write the records as JSON for scripts.

        The object has ``history_version``, ``ledger_version`` and ``passes``, oldest first. Each pass has ``pass``,
        ``class`` (``"module:qualified.name"``), ``options`` (an object; values that JSON lacks are their text),
        ``signature``, ``state`` ("applied", "undone" or "vetoed"), ``run``, ``index`` (its place in a composition, or
        null), ``reversible``, ``changed``, ``seconds``, ``rewritten`` (``site``, ``nodes_before``, ``nodes_after``,
        ``modules_before``, ``modules_after``, ``note``) and ``refused`` (``site``, ``reason``, ``message``,
        ``nodes``). Entries may be added; while ``history_version`` is the same, none is taken away or changes its
        meaning.

        Args:
            indent: how far to indent nested entries; None for one line.

        >>> History().to_json()
        '{"history_version": 1, "ledger_version": 1, "passes": []}'
        """
        from fxopt_core.ledger import LEDGER_VERSION  # it imports this module

        data = {"history_version": HISTORY_VERSION, "ledger_version": LEDGER_VERSION, "passes": list(map(_entry, self))}
        return json.dumps(data, indent=indent)


def options_text(options: Iterable[tuple[str, object]]) -> str:
    """Return options as a call has them.

    >>> options_text((("min_group", 2), ("where", "layer.*")))
    "min_group=2, where='layer.*'"
    """
    return ", ".join(f"{name}={value!r}" for name, value in options)


def _cells(record: Record) -> tuple[str, ...]:
    run = str(record.run) if record.index is None else f"{record.run}.{record.index}"
    counts = str(len(record.rewrites)), str(len(record.refusals)), f"{record.seconds * 1e3:.1f}"
    return run, record.pass_name, _short(options_text(record.options)), record.state, *counts


def _short(text: str, width: int = 40) -> str:
    line = " ".join(text.split())
    return line if len(line) <= width else f"{line[: width - 3]}..."


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = (
        cell.rjust(width) if name in _NUMBERS else cell.ljust(width)
        for name, cell, width in zip(_COLUMNS, cells, widths, strict=True)
    )
    return "  ".join(padded).rstrip()


def _sites(record: Record) -> Iterator[str]:
    for lines, what in ((map(_rewritten, record.rewrites), "rewritten"), (map(_refused, record.refusals), "refused")):
        for count, line in enumerate(lines):
            if count < _SHOWN:
                yield f"     {line}"
        hidden = len(record.rewrites if what == "rewritten" else record.refusals) - _SHOWN
        if hidden > 0:
            yield f"     ... and {hidden} more {what}; to_json() has them all"


def _rewritten(rewrite: Rewrite) -> str:
    before, after = rewrite.modules_before or rewrite.before, rewrite.modules_after or rewrite.after
    note = f" ({rewrite.note})" if rewrite.note else ""
    if before == after:
        return f"+ {rewrite.site}: changed in place{note}"
    return f"+ {rewrite.site} -> {', '.join(_within_parent(before, after)) or 'nothing'}{note}"


def _within_parent(before: Sequence[str], after: Sequence[str]) -> list[str]:
    """Return names without the parent that all of the names share."""
    parents = {name.rpartition(".")[0] for name in (*before, *after)}
    parent = parents.pop() if len(parents) == 1 else ""
    return [name.removeprefix(f"{parent}.") for name in after]


def _refused(refusal: Refusal) -> str:
    return f"- {refusal.site}: {refusal.reason}: {refusal.message}"


def _entry(record: Record) -> dict[str, Any]:
    return {
        "pass": record.pass_name,
        "class": record.transformation,
        "options": {name: _plain(value) for name, value in record.options},
        "signature": record.signature,
        "state": record.state,
        "run": record.run,
        "index": record.index,
        "reversible": record.reversible,
        "changed": record.changed,
        "seconds": record.seconds,
        "rewritten": [
            {
                "site": rewrite.site,
                "nodes_before": rewrite.before,
                "nodes_after": rewrite.after,
                "modules_before": rewrite.modules_before,
                "modules_after": rewrite.modules_after,
                "note": rewrite.note,
            }
            for rewrite in record.rewrites
        ],
        "refused": [
            {"site": refusal.site, "reason": refusal.reason, "message": refusal.message, "nodes": refusal.nodes}
            for refusal in record.refusals
        ],
    }


def _plain(value: object) -> object:
    """Return a value that JSON has, or its text."""
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return value if value is None or type(value) in (bool, int, float, str) else repr(value)
