"""The tables of a report."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

from fxopt.reporting.changes import DrawnSite
from fxopt.reporting.frames import Frame
from fxopt.reporting.markup import Content, Html, joined, tag
from fxopt_core import REASONS, Record
from fxopt_tools import OutputReport, Size, Statistics, Timing, VerificationReport

_ROWS = 200


def table(
    headings: Sequence[str], rows: Iterable[Html], *, numbers: Iterable[int] = (), label: str = "", live: bool = True
) -> Html:
    """Return a table; rows beyond the first 200 are folded away."""
    shown = list(rows)
    right = frozenset(numbers)
    head = tag(
        "tr", (tag("th", h, scope="col", class_="number" if i in right else None) for i, h in enumerate(headings))
    )
    first = _framed(head, shown[:_ROWS], label)
    if len(shown) <= _ROWS:
        return first
    more = tag(
        "details", tag("summary", f"{len(shown) - _ROWS} more"), _framed(head, shown[_ROWS:], label), class_="more"
    )
    return Html(first + more)


def _framed(head: Html, rows: Sequence[Html], label: str) -> Html:
    inside = tag("table", tag("thead", head), tag("tbody", rows), aria_label=label or None)
    return tag("div", inside, class_="table", tabindex="0", role="region", aria_label=label or None)


def row(*cells: Content, numbers: Iterable[int] = (), **attributes: object) -> Html:
    """Return a row."""
    right = frozenset(numbers)
    return tag("tr", (tag("td", c, class_="number" if i in right else None) for i, c in enumerate(cells)), **attributes)


def rewrites_table(sites: Sequence[DrawnSite]) -> Html:
    """Return the sites that were rewritten, with what became of them and where they are in the model."""
    rows = (
        row(
            _show(place, site),
            tag("code", site.record.pass_name, class_="whole"),
            site.site,
            _became(site),
            _source(site.frame),
            id=f"site-{place}",
        )
        for place, site in enumerate(sites)
        if site.rewritten
    )
    return table(("", "pass", "site", "before → after", "in the model"), rows, label="Rewrites")


def refusals_table(sites: Sequence[DrawnSite]) -> Html:
    """Return the sites that were refused, each with its reason, and what to do about it."""
    rows = (
        row(
            _show(place, site),
            tag("code", site.record.pass_name, class_="whole"),
            site.site,
            tag("span", site.reason, class_="tag held", title=REASONS.get(site.reason)),
            sentence(site.message),
            _source(site.frame),
            id=f"site-{place}",
        )
        for place, site in enumerate(sites)
        if not site.rewritten
    )
    return table(("", "pass", "site", "reason", "what was found", "in the model"), rows, label="Refusals")


def remedies(sites: Sequence[DrawnSite]) -> Html:
    """Return what to do about refusals, by reason."""
    counts = Counter(site.reason for site in sites if not site.rewritten)
    lines = (
        tag("li", tag("span", reason, class_="tag held"), f" {count} × {REASONS.get(reason, '')}")
        for reason, count in counts.most_common()
    )
    return tag("ul", lines)


def passes_table(records: Sequence[Record]) -> Html:
    """Return the passes that ran, oldest first."""
    headings = ("run", "pass", "options", "state", "rewritten", "refused", "ms")
    right = (4, 5, 6)
    rows = (
        row(
            str(record.run) if record.index is None else f"{record.run}.{record.index}",
            tag("code", record.pass_name),
            tag("code", record.options_text),
            record.state,
            str(len(record.rewrites)),
            str(len(record.refusals)),
            f"{record.seconds * 1e3:.1f}",
            numbers=right,
        )
        for record in records
    )
    return table(headings, rows, numbers=right, label="Passes")


def verification_table(report: VerificationReport) -> Html:
    """Return what comparing the outputs gave."""
    headings = ("output", "shape", "dtype", "max abs error", "max rel error", "SQNR dB", "original's", "allowed", "")
    right = (3, 4, 5, 6)
    rows = (_output_row(output, right) for output in report.outputs)
    notes = (tag("p", f"{'' if output.passed else 'Failed: '}{output}") for output in report.outputs if _remark(output))
    return Html(table(headings, rows, numbers=right, label="Numeric errors") + "".join(notes) + _notes(report.notes))


def _remark(output: OutputReport) -> bool:
    return bool(output.problem or output.excused)


def _output_row(output: OutputReport, right: tuple[int, ...]) -> Html:
    allowed = "equal"
    if output.tolerance is not None:
        allowed = f"rtol {output.tolerance.rtol:.3g}, atol {output.tolerance.atol:.3g} {output.tolerance_source or ''}"
    return row(
        tag("code", f"{output.path}" if not output.number else f"input {output.number}: {output.path}"),
        "–" if output.shape is None else str(tuple(output.shape)),
        "–" if output.dtype is None else str(output.dtype).removeprefix("torch."),
        _number(output.max_absolute_error, ".3g"),
        _number(output.max_relative_error, ".3g"),
        _number(output.sqnr_db, ".1f"),
        _number(output.original_sqnr_db, ".1f"),
        allowed.strip(),
        tag("span", "passed", class_="tag good") if output.passed else tag("span", "FAILED", class_="tag bad"),
        numbers=right,
    )


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


def _notes(notes: Iterable[str]) -> Html:
    return Html("".join(tag("p", note, class_="hint") for note in notes))


def sizes_table(before: Size | None, after: Size) -> Html:
    """Return nodes, modules, parameters and memory before and after."""
    names = (("nodes", "nodes"), ("modules", "modules"), ("parameters", "parameters"))
    rows = [_size_row(text, getattr(before, key, None), getattr(after, key)) for key, text in names]
    rows.append(
        _size_row("memory of parameters", getattr(before, "parameter_bytes", None), after.parameter_bytes, bytes_text)
    )
    return table(("", "before", "after", "change"), rows, numbers=(1, 2, 3), label="Sizes")


def _size_row(name: str, before: int | None, after: int, form: type[str] | object = str) -> Html:
    show = form if callable(form) else str
    if before is None:
        return row(name, "–", str(show(after)), "–", numbers=(1, 2, 3))
    share = f"{after - before:+,d}" if form is str else (f"{after / before - 1:+.1%}" if before else "–")
    return row(name, str(show(before)), str(show(after)), "none" if before == after else share, numbers=(1, 2, 3))


def bytes_text(number: int) -> str:
    """Return a number of bytes for people.

    >>> bytes_text(36), bytes_text(91_000_000)
    ('36 B', '86.8 MiB')
    """
    size, unit = float(number), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{number} B" if unit == "B" else f"{size:.1f} {unit}"


def timing_table(timing: Timing) -> Html:
    """Return the time of each pass."""
    right = (1, 2, 3, 4, 5)
    rows = (
        row(
            tag("code", f"{'undoing ' if each.reverse else ''}{each.name}"),
            str(each.runs),
            f"{each.seconds * 1e3:.1f}",
            f"{each.own * 1e3:.1f}",
            f"{each.share:.1%}",
            f"{each.around * 1e3:.1f}",
            numbers=right,
        )
        for each in timing.rows()
    )
    return table(("pass", "runs", "ms", "itself", "share", "around it"), rows, numbers=right, label="Time of passes")


def statistics_table(counted: Statistics) -> Html:
    """Return what each pass did to the size of the module."""
    right = (1, 2, 3, 4, 5, 6)
    rows = (
        row(
            tag("code", each.label),
            str(each.runs),
            str(each.rewritten),
            str(sum(each.refused.values())),
            _pair(each.before.nodes, each.after.nodes),
            _pair(each.before.modules, each.after.modules),
            _pair(each.before.parameter_bytes, each.after.parameter_bytes, bytes_text),
            numbers=right,
        )
        for each in counted.rows()
    )
    headings = ("pass", "runs", "rewritten", "refused", "nodes", "modules", "parameters")
    return table(headings, rows, numbers=right, label="Passes in numbers")


def _pair(before: int, after: int, show: object = str) -> str:
    form = show if callable(show) else str
    return str(form(before)) if before == after else f"{form(before)} → {form(after)}"


def speed_table(seconds: Mapping[str, Sequence[float]]) -> Html:
    """Return the time of calls by what was called: median, middle half, and each measurement as a dot."""
    largest = max((max(each) for each in seconds.values() if each), default=0.0)
    base = statistics.median(next(iter(seconds.values())))
    rows = (_speed_row(name, sorted(each), base, largest) for name, each in seconds.items())
    headings = ("", "median", "middle half", "speed", "calls", "each call, from zero")
    return table(headings, rows, numbers=(1, 2, 3, 4), label="Time of a call")


def quartiles(seconds: Sequence[float]) -> tuple[float, float, float]:
    """Return the lower quartile, the median and the upper quartile.

    >>> quartiles([1.0, 2.0, 3.0])
    (1.0, 2.0, 3.0)
    """
    if len(seconds) == 1:
        return seconds[0], seconds[0], seconds[0]
    low, middle, high = statistics.quantiles(seconds, n=4)
    return low, middle, high


def _speed_row(name: str, seconds: Sequence[float], base: float, largest: float) -> Html:
    low, middle, high = quartiles(seconds)
    return row(
        name,
        f"{middle * 1e3:.2f} ms",
        f"{low * 1e3:.2f} to {high * 1e3:.2f} ms",
        f"{base / middle:.2f} ×" if middle else "–",
        str(len(seconds)),
        _strip(seconds, low, middle, high, largest),
        numbers=(1, 2, 3, 4),
    )


def _strip(seconds: Sequence[float], low: float, middle: float, high: float, largest: float) -> Html:
    def at(value: float) -> str:
        return f"{5 + 250 * value / largest if largest else 5:.1f}"

    inside: Iterator[Html] = (tag("circle", class_="dot", cx=at(each), cy="11", r="3") for each in seconds)
    box = tag("rect", class_="middle", x=at(low), y="3", width=f"{float(at(high)) - float(at(low)):.1f}", height="16")
    line = tag("line", class_="median", x1=at(middle), x2=at(middle), y1="2", y2="20")
    return tag(
        "svg", box, inside, line, class_="strip", viewBox="0 0 260 22", role="img", aria_label="each call as a dot"
    )


def _show(place: int, site: DrawnSite) -> Html:
    if not site.before and not site.after:
        return Html("")
    return tag(
        "button", "show", type="button", class_="show", data_site=place, aria_label=f"Show {site.site} in the picture"
    )


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
