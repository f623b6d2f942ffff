"""How a registry shows itself: as lines in a terminal, as a table in a notebook."""

from __future__ import annotations

import html
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
    """Return what a registry offers, one line each."""
    parts = [_counted(len(passes), "pass", "passes")]
    parts += [_counted(len(pipelines), "pipeline", "pipelines")] if pipelines else []
    parts += [_counted(len(failed), "failed plugin", "failed plugins")] if failed else []
    lines = [f"fxopt registry: {', '.join(parts)}"]
    lines += _aligned((info.name, info.family, info.summary) for info in passes.values())
    lines += _section("pipelines:", pipelines)
    lines += _section("failed:", {name: _first_line(error) for name, error in failed.items()})
    return "\n".join(lines)


def html_listing(
    passes: Mapping[str, PassInfo], pipelines: Mapping[str, str], failed: Mapping[str, PluginLoadError]
) -> str:
    """Return what a registry offers as HTML tables; all text is escaped."""
    rows = [
        (info.name, info.summary, _options_text(info.options), _origin(info), "yes" if info.reversible else "no")
        for info in passes.values()
    ]
    tables = [_table(("pass", "summary", "options", "from", "reversible"), rows)]
    tables += [_table(("pipeline", "text"), pipelines.items())] if pipelines else []
    tables += [_table(("failed plugin", "error"), ((n, str(e)) for n, e in failed.items()))] if failed else []
    return "".join(tables)


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


def _options_text(options: Mapping[str, OptionInfo]) -> str:
    return ", ".join(map(_option_text, options.values()))


def _option_text(option: OptionInfo) -> str:
    known = option.annotation is not Parameter.empty
    kind = f": {show_annotation(option.annotation)}" if known else ""
    return f"{option_text(option.name)}{kind} = {option.default!r}"


def _table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = "".join(f"<th>{html.escape(cell)}</th>" for cell in header)
    body = "".join(f"<tr>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row)}</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
