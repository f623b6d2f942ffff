"""The folder with the pages of all passes."""

from __future__ import annotations

import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from fxopt_core import Registry, registry
from site_pages.pass_page import Page, page_of_pass


def write_pages(folder: Path, passes: Registry | None = None) -> list[Page]:
    """Write the pages of all passes that are registered, and one that lists them, into a folder that is emptied first.

    Args:
        folder: where to write.
        passes: which passes; if None, those that are installed.
    """
    known = registry() if passes is None else passes
    pages = [page_of_pass(info) for info in known.available().values()]
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for page in pages:
        (folder / f"{page.info.name}.md").write_text(page.text, encoding="utf-8")
        if page.drawing:
            (folder / f"{page.info.name}.svg").write_text(page.drawing, encoding="utf-8")
    listed = _list(pages, known.pipelines())
    (folder / "index.md").write_text(listed, encoding="utf-8")
    return pages


def _list(pages: Iterable[Page], pipelines: Mapping[str, str]) -> str:
    families: defaultdict[str, list[Page]] = defaultdict(list)
    for page in pages:
        families[page.info.family].append(page)
    parts = [_INTRODUCTION]
    for family in sorted(families):
        info = families[family][0].info
        origin = f", of `{info.distribution}`" if info.distribution else ""
        rows = ["| pass | does | graph | undo |", "|---|---|---|---|", *map(_row, families[family])]
        parts += [f"## {family}{origin}", "\n".join(rows)]
    if pipelines:
        rows = [f"| `{name}` | {_linked(text)} |" for name, text in pipelines.items()]
        parts += ["## Named pipelines", "\n".join(["| pipeline | runs |", "|---|---|", *rows])]
    names = [page.info.name for pages in families.values() for page in pages]
    parts.append("\n".join(["```{toctree}", ":hidden:", "", *names, "```"]))
    return "\n\n".join(parts) + "\n"


def _row(page: Page) -> str:
    info, summary = page.info, page.info.summary.replace("|", "\\|")
    drawing = f"[![before and after]({info.name}.svg)]({info.name}.md)" if page.drawing else ""
    return f"| [{info.name}]({info.name}.md) | {summary} | {drawing} | {'yes' if info.reversible else 'no'} |"


def _linked(text: str) -> str:
    return ", ".join(f"`{name.strip()}`" for name in text.split(",")) if "{" not in text else f"`{text}`"


_INTRODUCTION = """\
# Passes

Each pass has a page: the rewrite as an equation, a model before and after, its options, the reasons for which it leaves
a site alone, what it costs, and an example. The pages are made from the passes themselves whenever this site is built,
so that those of any installed family are here. In a shell, `fxopt list` and `fxopt show PASS` print the same.

In the drawings, red and dashed nodes are gone, green ones are new, and yellow ones have other arguments.\
"""
