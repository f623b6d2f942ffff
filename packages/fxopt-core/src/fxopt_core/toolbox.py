"""What a family may need of core beside its face: graphs and values as data, torch's code generators."""

from __future__ import annotations

from fxopt_core._torch import ExportCodeGen, PyTreeCodeGen
from fxopt_core.changes import changed, latest_change
from fxopt_core.ledger.records import ledger_of
from fxopt_core.naming import type_text
from fxopt_core.travel.graph_rows import read_graph, write_graph
from fxopt_core.values.forms import ValueReader, ValueWriter

__all__ = [
    "ExportCodeGen",
    "PyTreeCodeGen",
    "ValueReader",
    "ValueWriter",
    "changed",
    "latest_change",
    "ledger_of",
    "read_graph",
    "type_text",
    "write_graph",
]
