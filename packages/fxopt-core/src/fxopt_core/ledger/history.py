"""`history`: the records of a graph module, which print as a table and write themselves as JSON."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any

from torch.fx import GraphModule

from fxopt_core.graph import check_graph_module
from fxopt_core.ledger.records import LEDGER_VERSION, Record, Refusal, Rewrite, ledger_of
from fxopt_core.text import text_table

#: Incremented when scripts that read `History.to_json` have to change.
HISTORY_VERSION = 1

_COLUMNS = ("run", "pass", "options", "state", "rewritten", "refused", "ms")


class History(tuple[Record, ...]):
    """The records of everything applied to a graph module, as a tuple, oldest first.

    ``print`` shows a table: one line for each pass, and beneath it the sites that it rewrote and those that it left
    alone, each with its reason. Passes of one composition share the number of the run, followed by their position.

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
        return self.table(lambda record: [*map(site_text, record.rewrites), *map(site_text, record.refusals)])

    def table(self, sites: Callable[[Record], Iterable[str]]) -> str:
        """Return a table as ``print`` shows it, with these lines about the sites of each pass beneath it."""
        if not self:
            return "nothing was applied"
        heading, *rows = text_table([_COLUMNS, *map(_cells, self)], right=(4, 5, 6))
        lines = [heading]
        for record, row in zip(self, rows, strict=True):
            lines += [row, *(f"     {line}" for line in sites(record))]
        return "\n".join(lines)

    def to_json(self, *, indent: int | None = None) -> str:
        """Write the records as JSON for scripts.

        The object has ``history_version``, ``ledger_version`` and ``passes``, oldest first. Each pass has ``pass``,
        ``class`` (``"module:qualified.name"``), ``options`` (an object; values that JSON cannot hold become text),
        ``signature``, ``state`` ("applied", "undone" or "vetoed"), ``run``, ``index`` (its place in a composition, or
        null), ``reversible``, ``changed``, ``seconds``, ``rewritten`` (``site``, ``nodes_before``,
        ``nodes_after``, ``modules_before``, ``modules_after``, ``note``) and ``refused`` (``site``, ``reason``,
        ``message``, ``nodes``). While ``history_version`` stays the same, entries may be added, but none is removed or
        changes its meaning.

        Args:
            indent: how far to indent nested entries; None for one line.

        >>> History().to_json()
        '{"history_version": 1, "ledger_version": 1, "passes": []}'
        """
        versions = {"history_version": HISTORY_VERSION, "ledger_version": LEDGER_VERSION}
        return json.dumps({**versions, "passes": list(map(_entry, self))}, indent=indent, default=repr)


def history(graph_module: GraphModule) -> History:
    """Return the records of everything applied to a graph module, oldest first.

    Returns:
        A tuple of records. ``print`` shows it as a table, and its ``to_json()`` is for scripts.

    Raises:
        PreconditionError: The argument is not a graph module.

    >>> import torch
    >>> history(torch.fx.symbolic_trace(torch.nn.ReLU()))
    ()
    """
    check_graph_module(graph_module, "history")
    return History(ledger_of(graph_module).records)


def _cells(record: Record) -> tuple[str, ...]:
    run = str(record.run) if record.index is None else f"{record.run}.{record.index}"
    options = " ".join(record.options_text.split())
    shortened = options if len(options) <= 40 else f"{options[:37]}..."
    counts = str(len(record.rewrites)), str(len(record.refusals)), f"{record.seconds * 1e3:.1f}"
    return run, record.pass_name, shortened, record.state, *counts


def site_text(site: Rewrite | Refusal) -> str:
    """Return a line about a site: what became of it, or why it was left alone."""
    if isinstance(site, Refusal):
        return f"- {site.site}: {site.reason}: {site.message}"
    before, after = site.modules_before or site.before, site.modules_after or site.after
    note = f" ({site.note})" if site.note else ""
    if before == after:
        return f"+ {site.site}: changed in place{note}"
    parents = {name.rpartition(".")[0] for name in (*before, *after)}
    shared = f"{parents.pop()}." if len(parents) == 1 else ""
    names = ", ".join(name.removeprefix(shared) for name in after) or "nothing"
    return f"+ {site.site} -> {names}{note}"


_FIELDS = ("signature", "state", "run", "index", "reversible", "changed", "seconds")
_REWRITE = {"before": "nodes_before", "after": "nodes_after"}


def _entry(record: Record) -> dict[str, Any]:
    return {
        "pass": record.pass_name,
        "class": record.transformation,
        "options": dict(record.options),
        **{name: getattr(record, name) for name in _FIELDS},
        "rewritten": [{_REWRITE.get(name, name): getattr(r, name) for name in r.__slots__} for r in record.rewrites],
        "refused": [{name: getattr(r, name) for name in r.__slots__} for r in record.refusals],
    }
