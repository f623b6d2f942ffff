"""The tables of a report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import zip_longest

from fxopt_core import Record, meaning
from fxopt_report.changes import DrawnSite
from fxopt_report.frames import Frame
from fxopt_report.markup import Content, Html, joined, tag
from fxopt_report.pictures import Kinds
from fxopt_tools import OutputReport, VerificationReport

_ROWS = 200


def table(label: str, headings: Sequence[str], rows: Iterable[Sequence[Content]], ids: Sequence[str] = ()) -> Html:
    """Return a table; rows beyond the first 200 are folded away.

    Args:
        label: what it shows, for screen readers.
        headings: the headings of its columns; "#" marks a column of numbers, which are aligned right.
        rows: the cells of each row.
        ids: the id of each row, for links; none by default.
    """
    kinds = ["number" if text.startswith("#") else None for text in headings]
    titles = (tag("th", text.lstrip("#"), scope="col", class_=k) for text, k in zip(headings, kinds, strict=True))
    head = tag("thead", tag("tr", titles))
    lines = [
        tag("tr", (tag("td", cell, class_=kind) for cell, kind in zip(cells, kinds, strict=True)), id=name)
        for cells, name in zip_longest(rows, ids)
    ]

    def framed(part: list[Html]) -> Html:
        inside = tag("table", head, tag("tbody", part), aria_label=label)
        return tag("div", inside, class_="table", tabindex="0", role="region", aria_label=label)

    if len(lines) <= _ROWS:
        return framed(lines)
    more = tag("details", tag("summary", f"{len(lines) - _ROWS} more"), framed(lines[_ROWS:]), class_="more")
    return Html(framed(lines[:_ROWS]) + more)


def sites_table(sites: Sequence[tuple[int, DrawnSite]], *, rewritten: bool) -> Html:
    """Return numbered sites with what became of them, or with the reasons why they were refused."""
    rows = (
        [
            _show(place, site),
            tag("code", site.record.pass_name, class_="whole"),
            site.site,
            *([_became(site)] if rewritten else _refused(site)),
            _source(site.frame),
        ]
        for place, site in sites
    )
    label, headings = ("Rewrites", ["before → after"]) if rewritten else ("Refusals", ["reason", "what was found"])
    return table(label, ["", "pass", "site", *headings, "in the model"], rows, [f"site-{place}" for place, _ in sites])


def _refused(site: DrawnSite) -> list[Html]:
    reason = tag("span", site.reason, class_="tag held", title=meaning(site.reason, site.record))
    return [reason, sentence(site.message)]


def remedies(sites: Sequence[DrawnSite]) -> Html:
    """Return what to do about refusals, by reason."""
    counts = Counter(site.reason for site in sites if not site.rewritten)
    meanings = {site.reason: meaning(site.reason, site.record) for site in sites if not site.rewritten}
    lines = (
        tag("li", tag("span", reason, class_="tag held"), f" {count} × {meanings[reason]}")
        for reason, count in counts.most_common()
    )
    return tag("ul", lines)


def passes_table(records: Sequence[Record]) -> Html:
    """Return the passes that ran, oldest first."""
    rows = (
        (
            str(record.run) if record.index is None else f"{record.run}.{record.index}",
            tag("code", record.pass_name),
            tag("code", record.options_text),
            record.state,
            str(len(record.rewrites)),
            str(len(record.refusals)),
            f"{record.seconds * 1e3:.1f}",
        )
        for record in records
    )
    return table("Passes", ("run", "pass", "options", "state", "#rewritten", "#refused", "#ms"), rows)


def verification_table(report: VerificationReport) -> Html:
    """Return how the outputs compare."""
    errors = ("#max abs error", "#max rel error", "#SQNR dB", "#original's")
    rows = map(_output_row, report.outputs)
    shown = table("Numeric errors", ("output", "shape", "dtype", *errors, "allowed", ""), rows)
    remarkable = (output for output in report.outputs if output.problem or output.excused or output.unseen)
    remarks = [tag("p", f"{'' if output.passed else 'Failed: '}{output}") for output in remarkable]
    remarks += [] if report.problem is None or report.failures else [tag("p", f"Failed: {report.problem}")]
    return joined([shown, remarks, (tag("p", note, class_="hint") for note in report.notes)])


def _output_row(output: OutputReport) -> tuple[Content, ...]:
    ratio = _number(output.sqnr_db, ".1f")
    return (
        tag("code", f"input {output.number}: {output.path}" if output.number else output.path),
        "–" if output.shape is None else str(tuple(output.shape)),
        "–" if output.dtype is None else str(output.dtype).removeprefix("torch."),
        _number(output.max_absolute_error, ".3g"),
        _number(output.max_relative_error, ".3g"),
        ratio if output.cosine is None else f"{ratio} (cosine {output.cosine:.5f})",
        _number(output.original_sqnr_db, ".1f"),
        "equal" if output.allowed_text == "exact" else output.allowed_text,
        tag("span", "passed", class_="tag good") if output.passed else tag("span", "FAILED", class_="tag bad"),
    )


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def kinds_table(kinds: Kinds) -> Html:
    """Return the operations by kind whose numbers changed."""
    rows = [(tag("code", kind), str(old), str(new), f"{new - old:+d}") for kind, old, new in kinds if old != new]
    return table("Operations", ("operation", "#before", "#after", "#change"), rows)


def bytes_text(count: int) -> str:
    """Return a number of bytes for readers.

    >>> bytes_text(512), bytes_text(90_870_598)
    ('512 bytes', '90.9 MB')
    """
    for unit, factor in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= factor:
            return f"{count / factor:.1f} {unit}"
    return f"{count} bytes"


def change_text(before: int | None, after: int, show: Callable[[int], str] = str) -> str:
    """Return both numbers, or one where they look the same.

    >>> change_text(3, 4), change_text(4, 4), change_text(None, 4)
    ('3 → 4', '4', '4')
    """
    return show(after) if before is None or show(before) == show(after) else f"{show(before)} → {show(after)}"


def _show(place: int, site: DrawnSite) -> Html:
    if not site.before and not site.after:
        return Html("")
    label = f"Show {site.site} in the picture"
    return tag("button", "show", type="button", class_="show", data_site=place, aria_label=label)


def _became(site: DrawnSite) -> Html:
    undone = "" if site.record.state == "applied" else tag("span", site.record.state, class_="tag quiet")
    if site.was == site.became:
        return Html(f"{tag('code', ', '.join(site.was))} changed in place {undone}")
    parents = {name.rpartition(".")[0] for name in (*site.was, *site.became)}
    parent = f"{parents.pop()}." if len(parents) == 1 else ""
    was, became = (_names(names, parent) for names in (site.was, site.became))
    return Html(f"{was}{tag('span', '→', class_='arrow')}{became} {undone}")


def _names(names: Sequence[str], parent: str) -> Html:
    """Return names without the parent that they share, which the site names already."""
    return tag("code", ", ".join(name.removeprefix(parent) for name in names) or "nothing", title=", ".join(names))


def sentence(text: str) -> Html:
    """Return a sentence whose single backticks hold code.

    >>> sentence("module `<a>` is lazy")
    'module <code>&lt;a&gt;</code> is lazy'
    """
    parts = text.split("`")
    if len(parts) % 2 == 0:
        return joined(text)
    return joined([tag("code", part) if place % 2 else part for place, part in enumerate(parts)])


def _source(frame: Frame | None) -> Html:
    if frame is None:
        return tag("span", "unknown", class_="hint")
    return Html(tag("code", frame.place) + (tag("code", frame.code, class_="code") if frame.code else ""))
