"""The page of a report: one file that needs no network and no server."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import version
from importlib.resources import files

import torch

from fxopt_core import Record
from fxopt_report import tables
from fxopt_report.comparison import Comparison
from fxopt_report.drawing_data import drawing_json
from fxopt_report.markup import Content, Html, hash_source, tag
from fxopt_report.pictures import Picture
from fxopt_tools import Size, VerificationReport
from fxopt_tools.speed import Times, doubt
from fxopt_tools.verification.report import counted

_LEGEND = (
    ("removed", "−", "removed"),
    ("added", "+", "new"),
    ("changed", "~", "changed in place"),
    ("refused", "!", "refused"),
)
_KEYS = (
    ("wheel, + −", "zoom"),
    ("drag, arrows", "move"),
    ("0, 1", "show all, full size"),
    ("n, p", "next, previous change"),
    ("f, u", "fold, unfold modules"),
    ("/", "search; Enter for the next"),
    ("Esc", "clear the selection"),
)


@dataclass(frozen=True)
class Contents:
    """Everything that a report shows.

    Attributes:
        title: its heading.
        picture: the graphs.
        records: the passes that ran, oldest first.
        after: size of the transformed module.
        before: size of the original, or None where it is not known.
        verification: how the outputs compare.
        speed: seconds of calls, by what was called; the first is the original.
    """

    title: str
    picture: Picture
    records: tuple[Record, ...]
    after: Size
    before: Size | None = None
    verification: VerificationReport | None = None
    speed: Mapping[str, Sequence[float]] = field(default_factory=dict)


def page(contents: Contents) -> str:
    """Return the whole page."""
    style, script = asset("report.css"), asset("report.js")
    versions = f"fxopt {version('fxopt-core')} with torch {torch.__version__}"
    policy = (
        f"default-src 'none'; style-src {hash_source(style)}; script-src {hash_source(script)}; "
        "img-src data:; "  # the drawing, on its way to a PNG
        "base-uri 'none'; form-action 'none'"
    )
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", http_equiv="Content-Security-Policy", content=policy),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="referrer", content="no-referrer"),
        tag("title", contents.title),
        tag("style", Html(style)),
    )
    body = tag(
        "body",
        tag("a", "Skip the picture", href="#rewrites", class_="skip"),
        _header(contents),
        tag("main", *_sections(contents)),
        tag("footer", f"Written by {versions}. This file loads nothing from elsewhere."),
        tag("script", drawing_json(contents.picture), type="application/json", id="fxopt-data"),
        tag("script", Html(script)),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


@cache
def asset(name: str) -> str:
    """Return the text of a file of this package."""
    return files("fxopt_report").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _header(contents: Contents) -> Html:
    passes = dict.fromkeys(
        record.pass_name for record in contents.records if record.changed and record.state == "applied"
    )
    names = ((", " if place else "", tag("code", name)) for place, name in enumerate(passes))
    changed = tag("p", ("Changed by ", names) if passes else "Nothing was changed.", class_="sub")
    return tag("header", tag("h1", contents.title), changed, tag("ul", _cards(contents), class_="cards"))


def _cards(contents: Contents) -> Iterator[Html]:
    picture, before, after = contents.picture, contents.before, contents.after
    rewritten, refused = len(picture.rewritten), len(picture.refused)
    yield _card(str(rewritten), "site rewritten" if rewritten == 1 else "sites rewritten")
    yield _card(str(refused), "site refused" if refused == 1 else "sites refused", "held" if refused else None)
    nodes = None if picture.before is None else len(picture.before.nodes)
    yield _card(tables.change_text(nodes, len(picture.after.nodes)), "nodes")
    former = None if before is None else before.parameter_bytes
    yield _card(tables.change_text(former, after.parameter_bytes, tables.bytes_text), "parameters")
    if contents.verification is not None:
        passed = contents.verification.passed
        yield _card("passed" if passed else "FAILED", "numeric check", "good" if passed else "bad")
    if len(contents.speed) > 1 and not doubt([Times(tuple(seconds)) for seconds in contents.speed.values()]):
        yield _speed_card(next(iter(contents.speed.values())), *list(contents.speed.items())[-1])


def _speed_card(former: Sequence[float], name: str, seconds: Sequence[float]) -> Html:
    """Return the ratio of medians, and whether the middle halves of both overlap."""
    (low, middle, high), (least, median, most) = tables.quartiles(former), tables.quartiles(seconds)
    unclear = ", within the spread" if least <= high and low <= most else ""
    return _card(f"{middle / median:.2f} ×" if median else "–", f"speed of {name}{unclear}")


def _card(value: str, name: str, kind: str | None = None) -> Html:
    return tag("li", tag("b", value), tag("span", name), class_=kind)


def _sections(contents: Contents) -> Iterator[Html]:
    picture, sites = contents.picture, contents.picture.changes.sites
    yield _section("picture", "Graph", (tag("p", note, class_="note") for note in picture.notes), _picture(picture))
    if any(old != new for _, old, new in picture.kinds):
        yield _section("operations", "Operations", tables.kinds_table(picture.kinds))
    rewritten = any(site.rewritten for site in sites)
    no_rewrite = tag("p", "No site was rewritten.")
    shown = tables.grouped_sites(sites, rewritten=True) if rewritten else no_rewrite
    yield _section("rewrites", "Rewrites", shown)
    if picture.refused:
        advice = tag("details", tag("summary", "What to do"), tables.remedies(sites), class_="more")
        yield _section("refusals", "Refusals", tables.grouped_sites(sites, rewritten=False), advice)
    else:
        yield _section("refusals", "Refusals", tag("p", "No site was refused."))
    if contents.verification is not None:
        yield _section("numbers", "Numeric errors", tables.verification_table(contents.verification))
    speed = (tables.speed_table(contents.speed), tag("h3", "Size")) if contents.speed else None
    yield _section("costs", "Time and memory", speed, tables.sizes_table(contents.before, contents.after))
    yield _section("passes", "Passes", tables.passes_table(contents.records))


def _section(name: str, title: str, *content: Content) -> Html:
    return tag("section", tag("h2", title), *content, id=name)


def _picture(picture: Comparison) -> Html:
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
    steps = tag("span", _button("previous", "‹ change"), _button("next", "change ›"), class_="group")
    zooms = (("out", "−", "Zoom out"), ("one", "1:1", "Full size"), ("in", "+", "Zoom in"), ("fit", "fit", "Show all"))
    zoom = tag("span", (_button(name, text, label) for name, text, label in zooms), class_="group")
    folds = (("fold", "fold", "Fold modules into boxes"), ("unfold", "unfold", "Unfold modules"))
    fold = tag("span", (_button(name, text, label) for name, text, label in folds), class_="group")
    label = "Search nodes and modules"
    kinds = (("svg", "SVG", "Save the graph as SVG"), ("png", "PNG", "Save the graph as PNG"))
    saving = tag("span", (_button(name, text, label) for name, text, label in kinds), class_="group")
    search = tag("input", type="search", id="search", placeholder=label, aria_label=label)
    views = (("both", "Both", "true"), ("pane-before", "Before", "false"), ("pane-after", "After", "false"))
    view = (tag("button", text, type="button", data_open=name, aria_pressed=pressed) for name, text, pressed in views)
    return tag(
        "div",
        steps,
        tag("output", "", id="stop"),
        zoom,
        tag("output", "", id="zoom"),
        fold,
        tag("output", "", id="depth", aria_live="polite"),
        search,
        tag("output", "", id="found", aria_live="polite"),
        tag("span", view, class_="group") if both else None,
        saving,
        class_="tools",
    )


def _button(name: str, text: str, label: str | None = None) -> Html:
    return tag("button", text, type="button", data_do=name, aria_label=label, title=label)
