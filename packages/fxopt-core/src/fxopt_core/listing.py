"""How a registry shows itself: as lines in a terminal, as a table in a notebook."""

from __future__ import annotations

import html
import re
import shutil
from collections.abc import Iterable, Mapping
from inspect import Parameter
from typing import TYPE_CHECKING

from fxopt_core.coercion import show_annotation
from fxopt_core.errors import PluginLoadError
from fxopt_core.naming import option_text

if TYPE_CHECKING:
    from fxopt_core.options import OptionInfo
    from fxopt_core.plugins import PassInfo


def text_listing(
    passes: Mapping[str, PassInfo], pipelines: Mapping[str, str], failed: Mapping[str, PluginLoadError]
) -> str:
    """Return what a registry offers, one line each; summaries are cut to the terminal's width where there is one."""
    parts = [_counted(len(passes), "pass", "passes")]
    parts += [_counted(len(pipelines), "pipeline", "pipelines")] if pipelines else []
    parts += [_counted(len(failed), "failed plugin", "failed plugins")] if failed else []
    lines = [f"fxopt registry: {', '.join(parts)}"]
    columns = shutil.get_terminal_size(fallback=(0, 0)).columns
    rows = _aligned((info.name, info.family, _plain(info.summary)) for info in passes.values())
    lines += [_cut(line, columns) for line in rows]
    lines += _section("pipelines:", pipelines)
    lines += _section("failed:", {name: _first_line(error) for name, error in failed.items()})
    return "\n".join(lines)


def html_listing(
    passes: Mapping[str, PassInfo], pipelines: Mapping[str, str], failed: Mapping[str, PluginLoadError]
) -> str:
    """Return what a registry offers as HTML tables; all text is escaped."""
    rows = [
        (
            _escaped(info.name),
            _with_code(info.summary),
            "<br>".join(_escaped(_option_text(option)) for option in info.options.values()),
            _escaped(_origin(info)),
            _yes(info.reversible),
            _yes(info.preserves_computation),
        )
        for info in passes.values()
    ]
    tables = [_table(("pass", "summary", "options", "from", "reversible", "same results"), rows)]
    if pipelines:
        tables += [_table(("pipeline", "text"), (tuple(map(_escaped, item)) for item in pipelines.items()))]
    if failed:
        shown = ((_escaped(name), _escaped(str(error))) for name, error in failed.items())
        tables += [_table(("failed plugin", "error"), shown)]
    return "".join(tables)


def pass_listing(info: PassInfo) -> str:
    """Return what is known of one pass, its options one line each."""
    known = [f"{info.name}: {_plain(info.summary)}".rstrip(" :"), f"  from {_origin(info)}, plugin {info.family}"]
    known += ["  " + ", ".join(["reversible" if info.reversible else "not reversible", *_claims(info)])]
    return "\n".join([*known, *(f"  {_option_text(option)}" for option in info.options.values())])


def _claims(info: PassInfo) -> list[str]:
    return ["keeps what the graph computes"] if info.preserves_computation else []


def _counted(count: int, one: str, many: str) -> str:
    return f"{count} {one if count == 1 else many}"


def _section(title: str, entries: Mapping[str, str]) -> list[str]:
    return [title, *_aligned(entries.items())] if entries else []


def _aligned(rows: Iterable[tuple[str, ...]]) -> list[str]:
    listed = list(rows)
    widths = [max(map(len, column)) for column in zip(*listed, strict=True)]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in listed
    ]


def _first_line(error: PluginLoadError) -> str:
    return str(error).partition("\n")[0]


def _origin(info: PassInfo) -> str:
    return f"{info.distribution} {info.version}".strip() or info.family


def _option_text(option: OptionInfo) -> str:
    known = option.annotation is not Parameter.empty
    kind = f": {show_annotation(option.annotation)}" if known else ""
    return f"{option_text(option.name)}{kind} = {option.default!r}"


def _plain(summary: str) -> str:
    """Return a docstring's line without the marks of code."""
    return summary.replace("``", "`")


def _with_code(summary: str) -> str:
    return re.sub(r"(`+)(.+?)\1", r"<code>\2</code>", _escaped(summary))


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _cut(line: str, columns: int) -> str:
    return f"{line[: columns - 1]}\u2026" if 40 <= columns < len(line) else line


def _escaped(text: str) -> str:
    return html.escape(text)


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table of cells that are escaped already."""
    head = "".join(f"<th>{cell}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
