"""Each registered pass has a page on the site, a plugin's too, and the examples on it run."""

from __future__ import annotations

import importlib
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("sybil", reason="the group `documents` of pyproject.toml is not installed")

from document_examples import run

from fxopt_core import PassInfo, Registry, option_text, registry
from fxopt_rewrite import REASONS
from site_pages.pass_folder import write_pages
from site_pages.pass_page import Page, page_of_pass
from site_pages.public_names import public_module

PASSES = registry().available()
EXAMPLE = Path(__file__).parents[2] / "docs" / "examples" / "fxopt-attention" / "src"
SECTIONS = ["Before and after", "Options", "Why a site is left alone", "Cost", "Example"]

for_each_pass = pytest.mark.parametrize("name", PASSES)


@cache
def page(name: str) -> Page:
    """The page of an installed pass."""
    return page_of_pass(PASSES[name])


def headings(text: str) -> list[str]:
    """The headings of a page below its title."""
    return re.findall(r"^## (.*)$", text, re.MULTILINE)


def section(text: str, heading: str) -> str:
    """The text below a heading."""
    return text.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]


def changes_nodes(info: PassInfo) -> bool:
    """Whether a pass changes nodes at all: those of core do not, nor one that changes how they run."""
    return info.family != "core" and not info.transformation.replaces_code_generator


@for_each_pass
def test_a_page_says_all_there_is_to_say(name: str) -> None:
    text, info = page(name).text, PASSES[name]
    assert text.startswith(f"# {name}\n\n```{{eval-rst}}\n{info.summary}\n```\n")
    assert "->" in info.summary
    assert headings(text) == SECTIONS
    assert len(section(text, "Cost").split()) > 5
    assert "Its docstring" not in text
    assert ("**Source.**" in text) == (info.family != "core")
    assert ("| can be undone | yes" in text) == info.reversible
    assert f"| comes with | `{info.distribution}` {info.version} |" in text


@for_each_pass
def test_options_are_listed_and_written_as_a_pipeline(name: str) -> None:
    text, options = section(page(name).text, "Options"), PASSES[name].options.values()
    rows = re.findall(r"^\| `([\w-]+)` \| `(.+?)` \| `(.+?)` \| (.+) \|$", text, re.MULTILINE)
    assert [(row[0], row[2]) for row in rows] == [(option_text(each.name), repr(each.default)) for each in options]
    assert all(meaning.strip() for *_, meaning in rows)
    written = re.findall(r"```text\n(.*)\n```", text)
    assert bool(written) == bool(options)
    for each in written:
        assert registry().pipeline(each) == registry().create(name)


@for_each_pass
def test_codes_of_refusals_are_linked(name: str) -> None:
    text = section(page(name).text, "Why a site is left alone")
    general = re.findall(r"\{ref\}`([\w-]+) <reason-([\w-]+)>`", text)
    assert all(one == other for one, other in general)
    own = re.findall(r"^\| `([\w-]+)` \| .+ \|$", text, re.MULTILINE)
    reasons = PASSES[name].transformation.reasons
    assert ({*own}, {code for code, _ in general}) == (reasons.keys() - REASONS, reasons.keys() & REASONS)


@for_each_pass
def test_the_picture_shows_what_the_pass_changes(name: str) -> None:
    found = page(name)
    assert bool(found.drawing) == bool(found.report) == changes_nodes(PASSES[name])
    if found.drawing:
        assert found.drawing.startswith("<svg")
        assert re.search('class="(removed|added|changed)"', found.drawing)
        assert f"]({name}.svg)" in found.text
        assert f'<a href="{name}-report.html">' in found.text


class EntryPoint:
    """An entry point of a distribution that is not installed."""

    class dist:
        """Its distribution."""

        name, version = "fxopt-attention", "0.1.0"

    def __init__(self, name: str, module: str) -> None:
        self.name, self.module = name, module

    def load(self) -> Any:
        """Import the plugin."""
        return importlib.import_module(self.module)


def test_a_plugin_has_pages_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLE))
    stale = tmp_path / "passes" / "gone.md"
    stale.parent.mkdir()
    stale.touch()
    point: Any = EntryPoint("attention", "fxopt_attention.plugin")
    passes = Registry([point])
    pages = {found.info.name: found for found in write_pages(stale.parent, passes)}
    names = ["fold-query-scale", "fuse-query-scale", "remove-dropout"]
    assert list(pages) == names
    files = {f"{name}.{suffix}" for name in names for suffix in ("md", "svg")}
    assert {path.name for path in stale.parent.iterdir()} == {"index.md", *files}
    index = (stale.parent / "index.md").read_text(encoding="utf-8")
    drawing = "[![before and after](remove-dropout.svg)](remove-dropout.md)"
    assert f"| [remove-dropout](remove-dropout.md) | `dropout(x)` in eval mode -> `x`. | {drawing} | yes |" in index
    assert "\nfold-query-scale\nfuse-query-scale\nremove-dropout\n```" in index
    assert "| `attention` | `remove-dropout`, " in index
    for found in pages.values():
        assert headings(found.text) == SECTIONS
        assert "from fxopt_attention import " in found.text
        assert "Its docstring" not in found.text
        run(stale.parent / f"{found.info.name}.md")


class Outer:
    class Inner:
        """Cannot be imported by its name alone."""


def test_where_a_class_is_imported_from() -> None:
    from fxopt_linear.merge_linears import MergeLinears

    assert public_module(MergeLinears) == "fxopt_linear"
    assert public_module(torch.nn.Linear) == "torch.nn"
    assert public_module(Outer.Inner) is None
