"""Pictures saved from a report in headless Chromium, and the page at the width of a phone."""

from __future__ import annotations

import re
import struct
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from reporting_models import Small

# Here too: of skips at one line, pytest-xdist reports one file alone.
pytest.importorskip("playwright.sync_api")

from test_report_browser import CHROMIUM, browser, opened, pytestmark, settle, small  # noqa: F401  # fixtures
from torch.export import Dim

from fxopt_capture.capture import capture

SVG = "{http://www.w3.org/2000/svg}"


def test_svg_and_png_hold_both_graphs(opened: Any, small: Any, tmp_path: Path) -> None:  # noqa: F811
    page = opened(small)
    drawings = {}
    for kind in ("SVG", "PNG"):
        with page.expect_download() as download:
            page.get_by_role("button", name=f"Save the graph as {kind}").click()
        assert download.value.suggested_filename == f"A-model.{kind.lower()}"
        download.value.save_as(tmp_path / kind)
        drawings[kind] = (tmp_path / kind).read_bytes()

    text = drawings["SVG"].decode()
    assert "var(--" not in text
    assert "<script" not in text
    drawn = ElementTree.fromstring(text)
    nodes = [group for group in drawn.iter(f"{SVG}g") if "node" in group.get("class", "").split()]
    assert len(nodes) == 20
    assert {"conv", "conv_folded", "q_k_merged"} <= {str(node.findtext(f"{SVG}title")).split("\n")[0] for node in nodes}
    assert sum("edge" in path.get("class", "") for path in drawn.iter(f"{SVG}path")) >= 4

    assert drawings["PNG"].startswith(b"\x89PNG")
    width, height = struct.unpack(">II", drawings["PNG"][16:24])
    assert (width, height) == tuple(int(2 * float(drawn.attrib[side])) for side in ("width", "height"))
    assert len(drawings["PNG"]) > width * height / 400, "a blank picture is smaller"


def test_the_page_fits_a_phone_and_shapes_stand_beside_edges(opened: Any) -> None:  # noqa: F811
    page = opened(capture(Small(hook=False).eval(), torch.randn(2, 3, 16, 16), dynamic_shapes=({0: Dim.AUTO},)))
    settle(page)
    shapes = page.locator("#pane-after .shape").all_text_contents()
    assert any(re.findall(r"\d+", shape)[-3:] == ["3", "16", "16"] for shape in shapes), shapes
    page.set_viewport_size({"width": 390, "height": 844})
    settle(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    for label in ("Zoom in", "Save the graph as PNG"):
        box = page.get_by_role("button", name=label).bounding_box()
        assert box is not None
        assert box["x"] + box["width"] <= 390
