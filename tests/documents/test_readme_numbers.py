"""The README's table of gains, the numbers of its first sentence, and those that tutorials name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.results import FOLDER, read
from benchmarks.suite import Measured

from benchmarks import summary

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.skipif(not (FOLDER / "efficiency.json").exists(), reason="efficiency was not measured yet")
def test_the_table_and_the_picture_of_efficiency_are_those_of_the_file() -> None:
    results, text = read(FOLDER / "efficiency.json"), README.read_text(encoding="utf-8")
    assert summary.with_chart(text, results) == text, "run python -m benchmarks --page"
    assert summary.PICTURE.read_text(encoding="utf-8") == summary.chart(results)


@pytest.mark.skipif(not (FOLDER / "efficiency.json").exists(), reason="efficiency was not measured yet")
def test_the_first_sentence_has_the_range_of_the_table() -> None:
    text = README.read_text(encoding="utf-8")
    heading, _, *rows = text.split(summary.CHART)[1].split(summary.END_OF_CHART)[0].strip().splitlines()
    assert 1 <= len(rows) <= 4
    for way, unit in (("fxopt float32", "as fast in float32"), ("fxopt int8, dynamic", "times in int8")):
        place = [cell.strip() for cell in heading.split("|")].index(way)
        found = sorted(float(re.findall(r"[\d.]+", row.split("|")[place])[0]) for row in rows)
        assert re.search(rf"{found[0]:.1f} to {found[-1]:.1f}\s+(times )?{unit}", text), (way, found)


@pytest.mark.parametrize(
    ("page", "topic", "title", "ways"),
    [
        ("tutorial", "encoders", "all-MiniLM-L6-v2, 1 x 128", ("", "-bf16", "-int8")),
        ("tutorial", "encoders", "all-MiniLM-L6-v2, 1 x 16", ("", "-bf16", "-int8")),
        ("tutorial-vision", "cpu-inference", "EfficientNet-Lite0", ("", "torch.compile, freezing", "OpenVINO")),
    ],
)
def test_tutorials_have_the_numbers_of_the_files(page: str, topic: str, title: str, ways: tuple[str, ...]) -> None:
    text = README.with_name("docs").joinpath(f"{page}.md").read_text(encoding="utf-8")
    (table,) = (table for table in read(FOLDER / f"{topic}.json").tables if table.title == title)
    cells = {row.label.removeprefix("fxopt, cpu-inference"): row.cells[1] for row in table.rows}
    speeds = {way: f"{cell.median:.2f}" for way, cell in cells.items() if isinstance(cell, Measured)}
    assert re.search(r".{1,60}?\b".join(re.escape(speeds[way]) for way in ways), text, re.DOTALL)
