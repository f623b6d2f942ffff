"""The page of a report: one file that needs no network and no server."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from importlib.resources import files

import torch

from fxopt.reporting import tables
from fxopt.reporting.contents import Contents
from fxopt.reporting.drawing import drawing_json
from fxopt.reporting.markup import Html, hash_source, tag
from fxopt.reporting.pictures import Picture
from fxopt.reporting.tables import bytes_text

_LEGEND = (
    ("removed", "−", "removed"),
    ("added", "+", "new"),
    ("changed", "~", "changed in place"),
    ("refused", "!", "refused"),
)
_KEYS = (
    ("wheel, + −", "zoom"),
    ("drag, arrows", "move"),
    ("0, 1", "all of it, full size"),
    ("n, p", "next, previous change"),
    ("/", "search; Enter for the next"),
    ("Esc", "let go"),
)


def page(contents: Contents) -> str:
    """Return the whole page."""
    style, script = asset("report.css"), asset("report.js")
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
        tag("title", contents.title),
        tag("style", Html(style)),
    )
    body = tag(
        "body",
        tag("a", "Skip the picture", href="#rewrites", class_="skip"),
        _header(contents),
        tag("main", *_sections(contents)),
        _footer(),
        tag("script", drawing_json(contents.picture), type="application/json", id="fxopt-data"),
        tag("script", Html(script)),
    )
    return f"<!DOCTYPE html>\n{tag('html', head, body, lang='en')}\n"


@cache
def asset(name: str) -> str:
    """Return the text of a file of this package."""
    return files("fxopt.reporting").joinpath("assets").joinpath(name).read_text(encoding="utf-8")


def _header(contents: Contents) -> Html:
    lines = [tag("h1", contents.title)]
    passes = [record.pass_name for record in contents.records if record.changed and record.state == "applied"]
    lines.append(
        tag("p", "Changed by ", _listed(passes), class_="sub")
        if passes
        else tag("p", "Nothing was changed.", class_="sub")
    )
    return tag("header", lines, tag("ul", _cards(contents), class_="cards"))


def _listed(names: list[str]) -> list[Html | str]:
    unique = list(dict.fromkeys(names))
    found: list[Html | str] = []
    for place, name in enumerate(unique):
        found += [", " if place else "", tag("code", name)]
    return found


def _cards(contents: Contents) -> Iterator[Html]:
    picture = contents.picture
    yield _card(str(len(picture.rewritten)), "sites rewritten")
    yield _card(str(len(picture.refused)), "sites refused", "held" if picture.refused else None)
    before, after = contents.before, contents.after
    nodes = len(picture.before.nodes) if picture.before is not None else None
    yield _card(_change(nodes, len(picture.after.nodes)), "nodes")
    memory = bytes_text(after.parameter_bytes)
    former = memory if before is None else bytes_text(before.parameter_bytes)
    yield _card(memory if former == memory else f"{former} → {memory}", "parameters")
    if contents.verification is not None:
        passed = contents.verification.passed
        yield _card("passed" if passed else "FAILED", "same numbers", "good" if passed else "bad")
    if len(contents.speed) > 1:
        yield _speed_card(next(iter(contents.speed.values())), *list(contents.speed.items())[-1])


def _speed_card(former: Sequence[float], name: str, seconds: Sequence[float]) -> Html:
    """Return the ratio of medians, and whether the middle halves of both overlap."""
    (low, middle, high), (least, median, most) = tables.quartiles(former), tables.quartiles(seconds)
    unclear = ", within the spread" if least <= high and low <= most else ""
    return _card(f"{middle / median:.2f} ×" if median else "–", f"speed of {name}{unclear}")


def _card(value: str, name: str, kind: str | None = None) -> Html:
    return tag("li", tag("b", value), tag("span", name), class_=kind)


def _change(before: int | None, after: int) -> str:
    return str(after) if before is None or before == after else f"{before} → {after}"


def _sections(contents: Contents) -> Iterator[Html]:
    picture = contents.picture
    yield tag(
        "section",
        tag("h2", "Graph"),
        *(tag("p", n, class_="note") for n in picture.notes),
        _picture(picture),
        id="picture",
    )
    sites = picture.changes.sites
    rewritten = tables.rewrites_table(sites) if any(s.rewritten for s in sites) else tag("p", "No site was rewritten.")
    yield tag("section", tag("h2", "Rewrites"), rewritten, id="rewrites")
    if picture.refused:
        advice = tag("details", tag("summary", "What to do"), tables.remedies(sites), class_="more")
        yield tag("section", tag("h2", "Refusals"), tables.refusals_table(sites), advice, id="refusals")
    else:
        yield tag("section", tag("h2", "Refusals"), tag("p", "No site was refused."), id="refusals")
    if contents.verification is not None:
        yield tag(
            "section", tag("h2", "Numeric errors"), tables.verification_table(contents.verification), id="numbers"
        )
    yield tag("section", tag("h2", "Time and memory"), *_costs(contents), id="costs")
    yield tag("section", tag("h2", "Passes"), tables.passes_table(contents.records), *_watched(contents), id="passes")


def _costs(contents: Contents) -> Iterator[Html]:
    if contents.speed:
        yield tables.speed_table(contents.speed)
        yield tag("h3", "Size")
    yield tables.sizes_table(contents.before, contents.after)


def _watched(contents: Contents) -> Iterator[Html]:
    if contents.timing is not None:
        yield tag("h3", "Time of passes")
        yield tables.timing_table(contents.timing)
    if contents.statistics is not None:
        yield tag("h3", "Passes in numbers")
        yield tables.statistics_table(contents.statistics)


def _picture(picture: Picture) -> Html:
    words = ["before", "after"] if picture.before is not None else ["after"]
    graphs = {"before": picture.before, "after": picture.after}
    panes = (_pane(word, len(graph.nodes)) for word in words if (graph := graphs[word]) is not None)
    stage = tag(
        "div",
        tag("div", panes, class_="panes"),
        tag("aside", _hints(), class_="side", id="side", aria_live="polite", aria_label="What is chosen", tabindex="0"),
        class_="stage",
        id="stage",
    )
    legend = tag("ul", (tag("li", tag("i", sign, class_=kind), text) for kind, sign, text in _LEGEND), class_="legend")
    still = tag(
        "p", "The picture needs scripts; all that it tells of the passes stands in the tables.", class_="still hint"
    )
    return Html(still + tag("div", _tools(len(words) > 1), stage, legend, class_="live"))


def _pane(word: str, count: int) -> Html:
    title = tag("h3", word.capitalize(), " ", tag("small", f"{count} nodes"))
    label = f"The graph {word}: arrows move, plus and minus zoom, n and p go through the changes"
    view = tag("svg", class_="view", tabindex="0", role="application", aria_label=label)
    return tag("div", title, view, tag("svg", class_="ruler", aria_hidden="true"), class_="pane", id=f"pane-{word}")


def _hints() -> Html:
    keys = (tag("li", tag("kbd", key), f" {text}") for key, text in _KEYS)
    hint = tag("p", "Choose a node to see what it does, where it comes from, and its line in the model.", class_="hint")
    return Html(tag("h3", "Nothing is chosen") + hint + tag("h4", "Keys") + tag("ul", keys))


def _tools(both: bool) -> Html:
    steps = tag("span", _button("previous", "‹ change"), _button("next", "change ›"), class_="group")
    zooms = (("out", "−", "Zoom out"), ("one", "1:1", "Full size"), ("in", "+", "Zoom in"), ("fit", "fit", "Show all"))
    zoom = tag("span", (_button(name, text, label) for name, text, label in zooms), class_="group")
    search = tag(
        "input",
        type="search",
        id="search",
        placeholder="Search nodes and modules",
        aria_label="Search nodes and modules",
    )
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


def _footer() -> Html:
    from fxopt import __version__

    return tag(
        "footer",
        f"Written by fxopt {__version__} with torch {torch.__version__}. This file loads nothing from elsewhere.",
    )
