"""Reports: what stands in the page, that it is one file which loads nothing, and that text in it stays text."""

from __future__ import annotations

import json
import os
import re
import stat
from collections import Counter
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch
from reporting_models import HOSTILE, Small, hostile, layers, traced
from torch.fx import GraphModule

from fxopt_core import compose, undo
from fxopt_core.errors import PreconditionError
from fxopt_linear.merge_linears import MergeLinears
from fxopt_norm.convolutions import FuseBatchNorm2dInConv2d
from fxopt_report.markup import hash_source
from fxopt_report.reports import report
from fxopt_tools.verification.verify import verify

VOID = {"meta", "input", "br", "circle", "line", "path", "rect", "polygon"}


class Page(HTMLParser):
    """What a page holds: elements with their attributes, ids, scripts, and text by the section that it stands in."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.scripts: list[str] = []
        self.styles: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()
        assert not self.open, f"unclosed: {self.open}"

    def handle_starttag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attrs)))
        if name not in VOID:
            self.open.append(name)

    def handle_startendtag(self, name: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((name, dict(attrs)))

    def handle_endtag(self, name: str) -> None:
        assert self.open.pop() == name

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)
        elif self.open and self.open[-1] == "style":
            self.styles.append(data)
        else:
            self.text += data

    def all(self, name: str) -> list[dict[str, str | None]]:
        """The attributes of all elements of this name."""
        return [attributes for each, attributes in self.elements if each == name]

    @property
    def data(self) -> dict[str, Any]:
        """What the script of the page reads."""
        read: dict[str, Any] = json.loads(self.scripts[0])
        return read


@pytest.fixture(scope="module")
def small() -> tuple[GraphModule, str]:
    """A transformed model and its report, with everything in it."""
    torch.manual_seed(0)
    model = Small().eval()
    x = torch.randn(2, 3, 6, 6)
    graph_module = compose(FuseBatchNorm2dInConv2d(), MergeLinears(), inplace=False)(traced(model))
    made = report(model, graph_module, title="A small model", verification=verify(model, graph_module, x))
    return graph_module, made.html


def test_every_part_is_there(small: tuple[GraphModule, str]) -> None:
    page = Page(small[1])
    sections = [section["id"] for section in page.all("section")]
    assert sections == ["picture", "operations", "rewrites", "refusals", "numbers", "passes"]
    assert [t.get("aria-label") for t in page.all("table")] == [
        "Operations",
        "Rewrites",
        "Refusals",
        "Numeric errors",
        "Passes",
    ]
    for words in ("conv + norm", "q + k", "hooks", "has hooks", "passed", "merge-linears", "SQNR dB"):
        assert words in page.text, words


def test_rewrites_and_refusals_name_lines_of_the_model() -> None:
    from fxopt_capture.capture import capture

    model = Small().eval()
    graph_module = MergeLinears()(capture(model, (torch.randn(2, 3, 6, 6),)))
    text = Page(report(model, graph_module).html).text
    assert re.search(r"reporting_models\.py:\d+", text)
    assert "self.q(y), self.k(y), self.v(y)" in text


def test_it_is_one_file_that_loads_nothing(small: tuple[GraphModule, str]) -> None:
    page = Page(small[1])
    for name, attributes in page.elements:
        assert not attributes.keys() & {"src", "srcset", "background", "action", "formaction", "style"}, (
            name,
            attributes,
        )
        assert name not in ("link", "img", "iframe", "object", "embed", "base", "form")
        assert not any(key.startswith("on") for key in attributes)
        assert (attributes.get("href") or "#").startswith("#")
    remote = re.findall(r"(?:https?:)?//[\w.-]+", re.sub(r"http://www\.w3\.org/2000/svg", "", small[1]))
    assert not [found for found in remote if not found.startswith("// ")], remote
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(|WebSocket|sendBeacon|eval\(", small[1])


def test_the_policy_allows_its_own_script_and_style_alone(small: tuple[GraphModule, str]) -> None:
    page = Page(small[1])
    (policy,) = [str(meta["content"]) for meta in page.all("meta") if meta.get("http-equiv")]
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    (style,), script = page.styles, page.scripts[1]
    assert rules["style-src"] == hash_source(style)
    assert rules["script-src"] == hash_source(script)
    assert "unsafe" not in policy


def test_changed_nodes_are_marked_and_linked_both_ways(small: tuple[GraphModule, str]) -> None:
    data = Page(small[1]).data
    nodes = data["nodes"]
    number = {name: i for i, name in enumerate(nodes["name"])}
    assert nodes["links"][number["conv"]] == [number["conv_folded"]]
    assert nodes["refused"][number["v"]] == 1
    assert len({len(column) for column in nodes.values()}) == 1
    before, after = data["panes"]
    assert number["conv"] in before["nodes"]
    assert number["conv"] not in after["nodes"]
    row = {node: y for pane in data["panes"] for node, y in zip(pane["nodes"], pane["ys"], strict=True)}
    for pane in data["panes"]:
        assert all(row[node] == y for node, y in zip(pane["nodes"], pane["ys"], strict=True)), "rows are shared"
        assert pane["ys"] == sorted(pane["ys"])
        assert pane["tops"] == sorted(pane["tops"])


def test_each_site_has_a_row_and_the_row_shows_its_nodes(small: tuple[GraphModule, str]) -> None:
    page = Page(small[1])
    rows = {str(row["id"]) for row in page.all("tr") if row.get("id")}
    assert rows == {f"site-{i}" for i in range(len(page.data["sites"]))}
    shown = [int(str(button["data-site"])) for button in page.all("button") if button.get("data-site")]
    assert all(page.data["sites"][i]["nodes"] for i in shown)
    assert [stop["site"] for stop in page.data["stops"]] == [0, 1]


def test_ids_are_unique_and_links_have_a_target(small: tuple[GraphModule, str]) -> None:
    page = Page(small[1])
    ids = Counter(attributes["id"] for _, attributes in page.elements if "id" in attributes)
    assert max(ids.values()) == 1
    targets = {str(a["href"])[1:] for a in page.all("a")}
    assert targets <= ids.keys()


def test_it_can_be_used_by_keyboard_and_without_scripts(small: tuple[GraphModule, str]) -> None:
    page = Page(small[1])
    assert page.all("html") == [{"lang": "en"}]
    for name in ("button", "input", "aside"):
        assert all(a.get("aria-label") or name == "button" for a in page.all(name))
    assert all(svg.get("tabindex") == "0" for svg in page.all("svg") if svg.get("class") == "view")
    assert "needs scripts" in page.text
    assert "prefers-color-scheme: dark" in page.styles[0]


def test_hostile_text_stays_text() -> None:
    graph_module = hostile()
    MergeLinears()(graph_module)
    made = report(None, graph_module, title=HOSTILE[0])
    plain = report(None, MergeLinears()(traced(Small())))
    page = Page(made.html)
    assert len(page.scripts) == len(Page(plain.html).scripts) == 2
    assert {name for name, _ in page.elements} <= {name for name, _ in Page(plain.html).elements}
    assert HOSTILE[0] in page.text
    assert "\x00" not in made.html
    assert "\u202e" not in made.html
    assert "/home/someone" not in made.html
    targets = " ".join(page.data["nodes"]["target"])
    assert "</script><script>alert(1)</script>" in targets
    made.html.encode()


def test_a_page_says_what_is_not_known() -> None:
    from test_pictures import SwapAddAndMul

    graph_module = layers(30)
    compose(MergeLinears(), SwapAddAndMul())(graph_module)
    page = Page(report(None, graph_module).html)
    assert "swap-add-and-mul" in page.text
    assert "is not known" in page.text
    assert [pane["id"] for pane in page.data["panes"]] == ["pane-after"]
    assert not [b for b in page.all("button") if b.get("data-open")]


def test_a_model_that_nothing_changed_has_a_report() -> None:
    made = report(None, traced(Small()))
    page = Page(made.html)
    assert "Nothing was changed." in page.text
    assert "No site was rewritten." in page.text
    assert "No site was refused." in page.text
    assert str(made).endswith("nodes: 10 -> 10")


def test_what_was_undone_is_told() -> None:
    graph_module = traced(Small(hook=False))
    MergeLinears()(graph_module)
    undo(graph_module)
    page = Page(report(None, graph_module).html)
    assert "undone" in page.text
    assert not page.data["stops"]
    assert not [button for button in page.all("button") if button.get("data-site")]


def test_a_failed_verification_stands_out() -> None:
    model, other = Small(hook=False).eval(), Small(hook=False).eval()
    found = verify(model, other, torch.randn(2, 3, 6, 6))
    made = report(None, traced(other), verification=found)
    assert "FAILED" in made.html
    assert "FAILED" in str(made)


def test_the_same_report_is_the_same_file() -> None:
    graph_module = MergeLinears()(layers(60))
    assert report(None, graph_module).html == report(None, graph_module).html


def test_a_graph_module_that_was_edited_in_place_is_not_its_own_original() -> None:
    graph_module = MergeLinears()(layers(30))
    seen = report(graph_module, graph_module).picture
    assert seen.before is not None
    assert len(seen.before.nodes) != len(seen.after.nodes)


def test_a_node_takes_less_than_seven_hundred_bytes() -> None:
    short, long = (MergeLinears()(layers(nodes)) for nodes in (60, 600))
    sizes = [len(report(None, graph_module).html.encode()) for graph_module in (short, long)]
    assert sizes[1] - sizes[0] < 700 * (len(long.graph.nodes) - len(short.graph.nodes))


def test_many_rows_are_folded_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fxopt_report.tables._ROWS", 20)
    page = Page(report(None, MergeLinears()(layers(300))).html)
    assert re.search(r"5 more", page.text)
    assert len([row for row in page.all("tr") if row.get("id")]) == len(page.data["sites"])


def test_saving_writes_all_or_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = report(None, traced(Small()))
    path = made.save(tmp_path / "report.html")
    assert path.read_text(encoding="utf-8") == made.html
    assert path.stat().st_mode & stat.S_IRUSR
    with pytest.raises(PreconditionError, match="force=True"):
        made.save(path)
    with pytest.raises(PreconditionError, match="there is no folder"):
        made.save(tmp_path / "none" / "report.html")
    with pytest.raises(PreconditionError, match="exists"):
        made.save(tmp_path, force=True)
    path.write_text("mine", encoding="utf-8")

    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", fail)
        with pytest.raises(KeyboardInterrupt):
            made.save(path, force=True)
    assert path.read_text(encoding="utf-8") == "mine"
    assert os.listdir(tmp_path) == ["report.html"]
    assert made.save(str(path), force=True).read_text(encoding="utf-8") == made.html


def test_a_notebook_shows_the_page_in_a_frame_of_its_own() -> None:
    made = report(None, traced(Small()), title='"quoted" <title>')
    page = Page(made._repr_html_())
    ((name, attributes),) = page.elements
    assert name == "iframe"
    assert attributes["sandbox"] == "allow-scripts"
    assert attributes["srcdoc"] == made.html


def test_wrong_input_is_refused() -> None:
    with pytest.raises(PreconditionError, match=r"torch\.fx\.GraphModule"):
        report(None, Small())  # type: ignore[arg-type]  # what a caller may get wrong
