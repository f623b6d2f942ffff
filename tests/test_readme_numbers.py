"""The README's table of gains: bold where fxopt leads its row, and each encoder on both kinds of processors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from benchmarks.results import FOLDER, read

from benchmarks import summary

README = Path(__file__).parent.parent / "README.md"


def rows() -> list[list[str]]:
    text = README.read_text(encoding="utf-8").partition("<!-- end of efficiency -->")[2].partition("\n## ")[0]
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_bold_is_the_highest_of_its_row() -> None:
    heading, *measured = rows()
    assert len(measured) > 3
    for name, *cells in measured:
        speeds = [float(cell.strip("*")) if re.search(r"\d", cell) else 0.0 for cell in cells]
        leads = heading[1 + speeds.index(max(speeds))].startswith("fxopt")
        bold = [float(cell.strip("*")) for cell in cells if cell.startswith("**")]
        assert bold == ([max(speeds)] if leads else []), name


def test_encoders_are_quoted_with_and_without_avx512() -> None:
    names = [row[0] for row in rows()]
    encoders = [place for place, name in enumerate(names) if "MiniLM" in name]
    assert encoders
    for place in encoders:
        assert "AVX-512" in names[place]
        assert "AVX2 alone" in names[place + 1]


@pytest.mark.skipif(not (FOLDER / "efficiency.json").exists(), reason="efficiency was not measured yet")
def test_the_table_and_the_picture_of_efficiency_are_those_of_the_file() -> None:
    results, text = read(FOLDER / "efficiency.json"), README.read_text(encoding="utf-8")
    assert summary.with_chart(text, results) == text, "run python -m benchmarks --page"
    assert summary.PICTURE.read_text(encoding="utf-8") == summary.chart(results)
