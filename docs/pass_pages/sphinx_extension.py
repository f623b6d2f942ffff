"""The Sphinx extension: writes the pages of passes before documents are read, and lets them link to reason codes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx

from fxopt_core import REASONS
from pass_pages.folder import write_pages
from pass_pages.pages import Page

_PAGES: list[Page] = []


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect what has to be done."""
    app.connect("builder-inited", _write)
    app.connect("doctree-read", _anchor_codes)
    app.connect("build-finished", _write_reports)
    return {"parallel_read_safe": False, "version": "1"}


def _write(app: Sphinx) -> None:
    _PAGES[:] = write_pages(Path(app.srcdir, "passes"))


def _anchor_codes(app: Sphinx, document: nodes.document) -> None:
    """Make a target of each reason code in the table of the page `refusals`, for ``{ref}`reason-CODE```."""
    if app.env.docname != "refusals":
        return
    for row in document.findall(nodes.row):
        code = row[0].astext()
        if code in REASONS:
            target = f"reason-{code}"
            row["ids"].append(target)
            app.env.domains.standard_domain.note_hyperlink_target(target, "refusals", target, code)


def _write_reports(app: Sphinx, error: Exception | None) -> None:
    """Put the reports beside the pages that link to them."""
    if error is None and app.builder.format == "html":
        for page in _PAGES:
            if page.report:
                Path(app.outdir, "passes", f"{page.info.name}-report.html").write_text(page.report, encoding="utf-8")
