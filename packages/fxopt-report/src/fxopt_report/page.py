"""The page of a report: one file that needs no network and no server."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from importlib.resources import files
from os import PathLike
from pathlib import Path

import torch

from fxopt_core import PreconditionError, Record, registry
from fxopt_report import tables
from fxopt_report.drawing_data import drawing_json
from fxopt_report.markup import Content, Html, hash_source, tag
from fxopt_report.pictures import Picture
from fxopt_tools import Size, VerificationReport
from fxopt_tools.size import operations_text
from fxopt_tools.verification.report import counted

_FRAME_HEIGHT = 760
_LEGEND = (
    ("removed", "−", "removed"),
    ("added", "+", "new"),
    ("changed", "~", "changed in place"),
    ("refused", "!", "refused"),
)
_BUTTONS = (
    (("previous", "‹ change"), ("next", "change ›")),
    (("out", "−", "Zoom out"), ("one", "1:1", "Full size"), ("in", "+", "Zoom in"), ("fit", "fit", "Show all")),
)
_KEYS = (
    ("wheel, + −", "zoom"),
    ("drag, arrows", "move"),
    ("0, 1", "show all, full size"),
    ("n, p", "next, previous change"),
    ("/", "search; Enter for the next"),
    ("Esc", "clear the selection"),
)


@dataclass(frozen=True, eq=False, repr=False)
class Report:
    """A report on what passes did: ``print`` shows a summary, and a notebook the page.

    Attributes:
        title: its heading.
        picture: the graphs.
        records: the passes that ran, oldest first.
        after: size of the transformed module.
        before: size of the original, or None where it is not known.
        verification: how the outputs compare.
    """

    title: str
    picture: Picture
    records: tuple[Record, ...]
    after: Size
    before: Size | None = None
    verification: VerificationReport | None = None

    @cached_property
    def html(self) -> str:
        """The page: one file that loads nothing; only its picture needs scripts."""
        registry().available()  # imports the passes, which declare what their reasons mean
        return _page(self)

    def save(self, path: str | PathLike[str], *, force: bool = False) -> Path:
        """Write the page to a file, all of it or nothing.

        Args:
            path: where to write it.
            force: whether to replace a file that exists.

        Returns:
            The path.

        Raises:
            PreconditionError: The file exists, or the folder does not.
        """
        target = Path(path)
        if target.is_dir() or (target.exists() and not force):
            raise PreconditionError(f"{target} exists, expected a new file: give another path, or force=True")
        if not target.parent.is_dir():
            raise PreconditionError(f"there is no folder {target.parent} to write {target.name} into: make it first")
        # In the same folder, because `os.replace` fails across file systems.
        beside = target.with_name(f".{target.name}.{os.getpid()}.part")
        try:
            beside.write_text(self.html, encoding="utf-8", newline="\n")
            os.replace(beside, target)
        finally:
            beside.unlink(missing_ok=True)
        return target

    def __str__(self) -> str:
        """Return a summary in a few lines."""
        seen = self.picture
        lines = [f"{self.title}: {counted(len(seen.rewritten), 'site')} rewritten, {len(seen.refused)} refused"]
        before = "?" if seen.before is None else str(len(seen.before.nodes))
        lines.append(f"operations: {operations_text(seen.kinds)}; nodes: {before} -> {len(seen.after.nodes)}")
        if self.verification is not None:
            lines.append(str(self.verification).partition("\n")[0])
        return "\n".join([*lines, *(f"note: {note}" for note in seen.notes)])

    def _repr_html_(self) -> str:
        """Return the page for a notebook, in a frame of its own that isolates its styles and scripts."""
        return (
            f'<iframe sandbox="allow-scripts" title="{html.escape(self.title)}" width="100%" '
            f'height="{_FRAME_HEIGHT}" style="border:1px solid #8885;border-radius:6px" '
            f'srcdoc="{html.escape(self.html)}"></iframe>'
        )


def _page(report: Report) -> str:
    assets = files("fxopt_report").joinpath("assets")
    style, script = (assets.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    versions = f"fxopt {version('fxopt-core')} with torch {torch.__version__}"
    # By their hashes, so that no other script or style takes effect, even one that got past the escaping.
    policy = (
        f"default-src 'none'; style-src {hash_source(style)}; script-src {hash_source(script)}; "
        "base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", report.title),
        tag("style", Html(style)),
    )
    body = tag(
        "body",
        tag("a", "Skip the picture", href="#rewrites", class_="skip"),
        _header(report),
        tag("main", *_sections(report)),
        tag("footer", f"Written by {versions}. This file loads nothing from elsewhere."),
        tag("script", drawing_json(report.picture), type="application/json", id="fxopt-data"),
        tag("script", Html(script)),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


def _header(report: Report) -> Html:
    passes = dict.fromkeys(
        record.pass_name for record in report.records if record.changed and record.state == "applied"
    )
    names = ((", " if place else "", tag("code", name)) for place, name in enumerate(passes))
    changed = tag("p", ("Changed by ", names) if passes else "Nothing was changed.", class_="sub")
    return tag("header", tag("h1", report.title), changed, tag("ul", _cards(report), class_="cards"))


def _cards(report: Report) -> Iterator[Html]:
    picture, before, after = report.picture, report.before, report.after
    rewritten, refused = len(picture.rewritten), len(picture.refused)
    yield _card(str(rewritten), "site rewritten" if rewritten == 1 else "sites rewritten")
    yield _card(str(refused), "site refused" if refused == 1 else "sites refused", "held" if refused else None)
    nodes = None if picture.before is None else len(picture.before.nodes)
    yield _card(tables.change_text(nodes, len(picture.after.nodes)), "nodes")
    former = None if before is None else before.parameter_bytes
    yield _card(tables.change_text(former, after.parameter_bytes, tables.bytes_text), "parameters")
    if report.verification is not None:
        passed = report.verification.passed
        yield _card("passed" if passed else "FAILED", "numeric check", "good" if passed else "bad")


def _card(value: str, name: str, kind: str | None = None) -> Html:
    return tag("li", tag("b", value), tag("span", name), class_=kind)


def _sections(report: Report) -> Iterator[Html]:
    picture, sites = report.picture, report.picture.changes.sites
    yield _section("picture", "Graph", (tag("p", note, class_="note") for note in picture.notes), _picture(picture))
    if any(old != new for _, old, new in picture.kinds):
        yield _section("operations", "Operations", tables.kinds_table(picture.kinds))
    advice = tag("details", tag("summary", "What to do"), tables.remedies(sites), class_="more")
    for name, word, more in (("rewrites", "rewritten", None), ("refusals", "refused", advice)):
        chosen = [(place, site) for place, site in enumerate(sites) if site.rewritten == (word == "rewritten")]
        shown = tables.sites_table(chosen, rewritten=word == "rewritten")
        content = (shown, more) if chosen else tag("p", f"No site was {word}.")
        yield _section(name, name.capitalize(), content)
    if report.verification is not None:
        yield _section("numbers", "Numeric errors", tables.verification_table(report.verification))
    yield _section("passes", "Passes", tables.passes_table(report.records))


def _section(name: str, title: str, *content: Content) -> Html:
    return tag("section", tag("h2", title), *content, id=name)


def _picture(picture: Picture) -> Html:
    graphs = {"before": picture.before, "after": picture.after}
    panes = [_pane(word, len(graph.nodes)) for word, graph in graphs.items() if graph is not None]
    stage = tag(
        "div",
        tag("div", panes, class_="panes"),
        tag("aside", _hints(), class_="side", id="side", aria_live="polite", aria_label="Selection", tabindex="0"),
        class_="stage",
        id="stage",
    )
    legend = tag("ul", (tag("li", tag("i", sign, class_=kind), text) for kind, sign, text in _LEGEND), class_="legend")
    text = "The picture needs scripts; the tables have everything that it shows of the passes."
    still = tag("p", text, class_="still hint")
    return Html(still + tag("div", _tools(len(panes) > 1), stage, legend, class_="live"))


def _pane(word: str, count: int) -> Html:
    title = tag("h3", word.capitalize(), " ", tag("small", counted(count, "node")))
    label = f"The graph {word}: arrows move, plus and minus zoom, n and p go through the changes"
    view = tag("svg", class_="view", tabindex="0", role="application", aria_label=label)
    return tag("div", title, view, tag("svg", class_="ruler", aria_hidden="true"), class_="pane", id=f"pane-{word}")


def _hints() -> Html:
    keys = (tag("li", tag("kbd", key), f" {text}") for key, text in _KEYS)
    hint = tag("p", "Select a node to see what it does and which line of the model it comes from.", class_="hint")
    return Html(tag("h3", "Nothing is selected") + hint + tag("h4", "Keys") + tag("ul", keys))


def _tools(both: bool) -> Html:
    steps, zoom = (tag("span", (_button(*each) for each in group), class_="group") for group in _BUTTONS)
    label = "Search nodes and modules"
    search = tag("input", type="search", id="search", placeholder=label, aria_label=label)
    views = (("both", "Both", "true"), ("pane-before", "Before", "false"), ("pane-after", "After", "false"))
    view = (tag("button", text, type="button", data_open=name, aria_pressed=pressed) for name, text, pressed in views)
    return tag(
        "div",
        steps,
        tag("output", "", id="stop"),
        zoom,
        tag("output", "", id="zoom"),
        search,
        tag("output", "", id="found", aria_live="polite"),
        tag("span", view, class_="group") if both else None,
        class_="tools",
    )


def _button(name: str, text: str, label: str | None = None) -> Html:
    return tag("button", text, type="button", data_do=name, aria_label=label, title=label)
