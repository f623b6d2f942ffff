"""Reports in headless Chromium: they open without a complaint, can be searched, zoomed and gone through.

Skipped where there is no playwright, or no Chromium: `CHROMIUM` names one that is not on the path.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from reporting_models import Small, hostile, layers, traced
from torch.export import Dim

from fxopt_capture.capture import capture
from fxopt_core import compose
from fxopt_linear.merge_linears import MergeLinears
from fxopt_norm.convolutions import FuseBatchNorm2dInConv2d
from fxopt_report.reports import report

sync_api = pytest.importorskip("playwright.sync_api")

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Dialog, Page

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
CHROMIUM = os.environ.get("CHROMIUM") or next((found for name in NAMES if (found := shutil.which(name))), None)
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium: install one, or name it by CHROMIUM"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # playwright's, of pipes that it closes late
]
Opener = Callable[..., "Page"]
NODES = 600


def written(model: Any, path: Path) -> Path:
    """A report on a model, in a file."""
    return report(None, model, title="A model").save(path)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on a model with two rewrites and a refusal."""
    graph_module = compose(FuseBatchNorm2dInConv2d(), MergeLinears())(traced(Small()))
    return written(graph_module, tmp_path_factory.mktemp("small") / "small.html")


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The report on a model of many layers."""
    return written(MergeLinears()(layers(NODES)), tmp_path_factory.mktemp("long") / "long.html")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """A browser without a window and without a network."""
    with sync_api.sync_playwright() as playwright:
        # No sandbox of its own inside that of a container.
        started = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Opener]:
    """Open reports; in the end, nothing may have been complained of, and nothing but the file been asked for."""
    pages: list[Page] = []
    complaints: list[str] = []
    asked: list[str] = []

    def refuse(dialog: Dialog) -> None:
        complaints.append(dialog.message)
        dialog.dismiss()

    def opener(model: Any, **options: Any) -> Page:
        path = model if isinstance(model, Path) else written(model, tmp_path / f"{len(pages)}.html")
        page = browser.new_page(**{"viewport": {"width": 1400, "height": 1000}, **options})
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: asked.append(request.url))
        page.on("dialog", refuse)
        page.goto(path.as_uri())
        if options.get("java_script_enabled", True):
            page.wait_for_selector("html[data-ready]", state="attached", timeout=20_000)
        pages.append(page)
        return page

    yield opener
    for page in pages:
        page.close()
    assert not complaints
    assert all(url.startswith("file:") for url in asked)
    assert len(asked) == len(pages)


def settle(page: Page) -> None:
    """Wait until what was asked for is drawn."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")


@pytest.mark.parametrize("width", [1440, 390])
def test_graphs_begin_at_the_top_of_their_panes_and_fit_their_width(small: Path, opened: Opener, width: int) -> None:
    page = opened(small, viewport={"width": width, "height": 900})
    for pane in ("before", "after"):
        outer = page.locator(f"#pane-{pane}").bounding_box()
        nodes = [node.bounding_box() for node in page.locator(f"#pane-{pane} .node .box").all()]
        assert outer
        assert len(nodes) > 5
        assert 30 < min(node["y"] for node in nodes if node) - outer["y"] < 60
        assert all(node and outer["x"] <= node["x"] for node in nodes)
        assert all(node and node["x"] + node["width"] <= outer["x"] + outer["width"] for node in nodes)


def marked(page: Page, pane: str, kind: str) -> set[str]:
    """Names of the nodes in a pane that are drawn as something."""
    settle(page)
    titles = page.locator(f"#pane-{pane} .node.{kind} title").all_text_contents()
    return {title.split("\n")[0] for title in titles}


def zoomed(page: Page) -> int:
    """How large things are drawn, in percent."""
    return int(str(page.locator("#zoom").text_content()).split()[0])


def test_nodes_are_drawn_and_marked(opened: Opener, small: Path) -> None:
    page = opened(small)
    assert marked(page, "before", "removed") == {"conv", "norm", "q", "k"}
    assert marked(page, "after", "added") == {"conv_folded", "q_k_merged", "narrow", "narrow_1"}
    assert marked(page, "after", "refused") == marked(page, "before", "refused") == {"v"}
    assert page.locator("#pane-after .edge").count() > 0


def test_choosing_a_node_leads_to_the_other_graph_and_back(opened: Opener, small: Path) -> None:
    page = opened(small)
    page.locator("#pane-after .node.added", has_text="q_k_merged").click()
    side = page.locator("#side")
    assert "Came from (2)" in str(side.text_content())
    assert {"q", "k"} <= marked(page, "before", "chosen")
    side.get_by_role("button", name="q", exact=True).click()
    assert "Became" in str(side.text_content())
    assert "q_k_merged" in marked(page, "after", "chosen")
    page.keyboard.press("Escape")
    assert not marked(page, "after", "chosen")
    assert "Nothing is selected" in str(side.text_content())


def test_rows_of_the_tables_show_their_nodes(opened: Opener, small: Path) -> None:
    page = opened(small)
    page.get_by_role("button", name="Show q + k in the picture").click()
    assert {"q", "k"} == marked(page, "before", "chosen")
    page.get_by_role("button", name="Show v in the picture").click()
    assert "has hooks" in str(page.locator("#side").text_content())
    assert "v" in marked(page, "after", "chosen")


def test_search_finds_goes_on_and_lets_go(opened: Opener, long: Path) -> None:
    page = opened(long)
    page.keyboard.press("/")
    page.keyboard.type("blocks.7 merged")
    assert page.locator("#found").text_content() == "1 found"
    page.keyboard.press("Enter")
    settle(page)
    assert page.locator("#found").text_content() == "1 of 1"
    assert "blocks_7_q_k_v_merged" in marked(page, "after", "chosen")
    page.locator("#search").fill("Linear norm")
    assert page.locator("#found").text_content() == "0 found"
    page.locator("#search").fill("layernorm")
    found = int(str(page.locator("#found").text_content()).split()[0])
    assert found == NODES // 12
    page.keyboard.press("Escape")
    assert page.locator("#found").text_content() == ""


def test_wheel_buttons_and_keys_zoom_and_move(opened: Opener, long: Path) -> None:
    page = opened(long)
    start = zoomed(page)
    page.get_by_role("button", name="Zoom in").click()
    assert zoomed(page) > start
    page.get_by_role("button", name="Full size").click()
    assert zoomed(page) == 100
    view = page.locator("#pane-after .view")
    view.hover()
    page.mouse.wheel(0, -240)
    settle(page)
    assert zoomed(page) > 100
    view.focus()
    page.keyboard.press("0")
    assert zoomed(page) < 50
    settle(page)
    assert page.locator("#pane-after .far-nodes.added").count() == 1
    page.keyboard.press("1")
    world = page.locator("#pane-after .view > g")
    before = world.get_attribute("transform")
    page.keyboard.press("ArrowDown")
    settle(page)
    assert world.get_attribute("transform") != before
    box = view.bounding_box()
    assert box is not None
    before = world.get_attribute("transform")
    page.mouse.move(box["x"] + 200, box["y"] + 200)
    page.mouse.down()
    page.mouse.move(box["x"] + 260, box["y"] + 290, steps=4)
    page.mouse.up()
    settle(page)
    assert world.get_attribute("transform") != before


def test_changes_can_be_gone_through(opened: Opener, long: Path) -> None:
    page = opened(long)
    count = NODES // 12
    for key, text in (
        ("n", f"1 of {count}"),
        ("n", f"2 of {count}"),
        ("p", f"1 of {count}"),
        ("p", f"{count} of {count}"),
    ):
        page.keyboard.press(key)
        assert page.locator("#stop").text_content() == text
        settle(page)
        assert len(marked(page, "before", "chosen")) == 3
        assert len(marked(page, "after", "chosen")) == 4


def test_without_scripts_there_are_the_tables(opened: Opener, small: Path) -> None:
    page = opened(small, java_script_enabled=False)
    assert page.get_by_text("The picture needs scripts").is_visible()
    assert not page.locator("#stage").is_visible()
    assert not page.locator(".show").first.is_visible()
    assert page.get_by_role("cell", name="conv + norm").is_visible()


def test_hostile_text_does_nothing(opened: Opener) -> None:
    page = opened(MergeLinears()(hostile()))
    for _ in range(3):
        page.keyboard.press("n")
    page.locator("#search").fill("script")
    page.keyboard.press("Enter")
    assert page.locator("img").count() == 0
    assert page.locator("script").count() == 2


def test_text_stands_out_from_what_is_behind_it(opened: Opener, small: Path) -> None:
    """Contrast of 4.5 to 1 at least, in both colour schemes, for text and for the texts of nodes."""
    page = opened(small, color_scheme="light")
    light: dict[str, float] = page.evaluate(CONTRAST)
    page.emulate_media(color_scheme="dark")
    dark: dict[str, float] = page.evaluate(CONTRAST)
    assert light != dark
    for ratios in (light, dark):
        assert ratios
        assert min(ratios.values()) >= 4.5, ratios


CONTRAST = """() => {
  const value = (name) => getComputedStyle(document.documentElement).getPropertyValue("--" + name).trim();
  const light = (hex) => {
    const parts = [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16) / 255);
    const [r, g, b] = parts.map((c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ratio = (one, other) => {
    const [a, b] = [light(value(one)), light(value(other))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  const pairs = [["text", "page"], ["text", "panel"], ["text", "raised"], ["muted", "page"], ["muted", "panel"],
    ["muted", "raised"], ["accent", "page"], ["accent", "panel"], ["page", "accent"], ["changed-text", "changed-fill"],
    ["text", "removed-fill"], ["text", "added-fill"], ["text", "changed-fill"], ["muted", "removed-fill"],
    ["muted", "added-fill"], ["muted", "changed-fill"], ["added", "page"], ["removed", "page"], ["refused", "page"],
    ["added", "panel"], ["removed", "panel"], ["refused", "panel"]];
  return Object.fromEntries(pairs.map(([one, other]) => [`${one} on ${other}`, ratio(one, other)]));
}"""


@pytest.mark.parametrize("nodes", [NODES, pytest.param(5100, marks=pytest.mark.nightly)])
def test_many_nodes_can_be_zoomed_and_searched(opened: Opener, long: Path, nodes: int) -> None:
    page = opened(long if nodes == NODES else MergeLinears()(layers(nodes)))
    page.keyboard.press("0")
    settle(page)
    assert page.locator(".node").count() == 0, "from afar, nodes are drawn in one path of each kind"
    page.keyboard.press("1")
    settle(page)
    assert 0 < page.locator(".node").count() < 200, "only what is in view is drawn"
    page.locator("#search").fill("relu")
    page.keyboard.press("Enter")
    assert page.locator("#found").text_content() == f"1 of {nodes // 12}"


def test_the_page_fits_a_phone_and_shapes_stand_beside_edges(opened: Opener) -> None:
    page = opened(capture(Small(hook=False).eval(), torch.randn(2, 3, 16, 16), dynamic_shapes=({0: Dim.AUTO},)))
    settle(page)
    shapes = page.locator("#pane-after .shape").all_text_contents()
    assert any(re.findall(r"\d+", shape)[-3:] == ["3", "16", "16"] for shape in shapes), shapes
    page.set_viewport_size({"width": 390, "height": 844})
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for label in ("Zoom in", "Show all"):
        box = page.get_by_role("button", name=label).bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 390
