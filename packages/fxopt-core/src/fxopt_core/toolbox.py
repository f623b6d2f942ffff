"""What a family may need of core beside its face: torch's code generators, changes, the ledger."""

from __future__ import annotations

from fxopt_core._torch import ExportCodeGen, PyTreeCodeGen
from fxopt_core.changes import changed, latest_change
from fxopt_core.ledger.records import ledger_of
from fxopt_core.naming import type_text

__all__ = [
    "ExportCodeGen",
    "PyTreeCodeGen",
    "changed",
    "latest_change",
    "ledger_of",
    "type_text",
]
