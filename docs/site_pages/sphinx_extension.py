"""The Sphinx extension: writes the pages that are made before documents are read, and lets them link to codes."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.inspect import stringify_signature

from fxopt_core import Transformation
from fxopt_rewrite import REASONS
from site_pages.pass_folder import write_pages
from site_pages.pass_page import Page
from site_pages.references import write_references

_PAGES: list[Page] = []


def setup(app: Sphinx) -> dict[str, Any]:
    """Connect the handlers below to the events of a build."""
    app.connect("builder-inited", _write)
    app.connect("autodoc-skip-member", _skips_field)
    app.connect("autodoc-process-signature", _signature_of_pass)
    app.connect("autodoc-process-docstring", _plain_first_line, priority=100)  # before napoleon
    app.connect("doctree-read", _anchor_codes)
    app.connect("build-finished", _write_reports)
    return {"parallel_read_safe": False, "version": "1"}


def _write(app: Sphinx) -> None:
    _PAGES[:] = write_pages(Path(app.srcdir, "passes"))
    write_references(Path(app.srcdir, "reference"))


def _skips_field(app: Sphinx, what: str, name: str, value: object, skip: bool, options: object) -> bool | None:
    """Leave out the fields of named tuples: the docstring of the class describes them."""
    return True if str(value.__doc__).startswith("Alias for field number") else None


def _signature_of_pass(
    app: Sphinx, what: str, name: str, value: object, options: object, signature: str, returns: str
) -> tuple[str, str] | None:
    """Show the options of a pass: Sphinx shows what `Transformation.__new__` takes, which is anything."""
    if what != "class" or not (isinstance(value, type) and issubclass(value, Transformation)):
        return None
    function = value.__init__
    if function is object.__init__:
        return "()", ""
    own = inspect.signature(function)
    shown = own.replace(parameters=list(own.parameters.values())[1:], return_annotation=inspect.Signature.empty)
    return stringify_signature(shown, unqualified_typehints=True), ""


def _plain_first_line(app: Sphinx, what: str, name: str, value: object, options: object, lines: list[str]) -> None:
    """Keep napoleon from taking the words before a colon in the docstring of a property for its type."""
    if what in ("attribute", "data", "property") and lines:
        lines[:0] = ["..", ""]  # an empty comment, which leaves no trace


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
