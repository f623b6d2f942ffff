"""`fxopt optimize --report` on a published CNN and on an encoder of twelve layers."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from typer.testing import CliRunner

from fxopt.commands.main import build_app


def reported(source: str, folder: Path, *arguments: str) -> str:
    """Optimize with a report; return the page."""
    out, page = folder / "fast.fxopt", folder / "fast.html"
    command = ["optimize", source, "-o", str(out), "--report", str(page), "--json", *arguments]
    result = CliRunner().invoke(build_app(plain=True), command)
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert (data["output"], data["report"], data["problem"]) == (str(out), str(page), None)
    return page.read_text(encoding="utf-8")


def test_a_published_cnn(tmp_path: Path) -> None:
    torch.save((torch.randn(2, 3, 64, 64),), tmp_path / "images.pt")
    page = reported("published_weights:efficientnet", tmp_path, "--inputs", str(tmp_path / "images.pt"))
    assert "PackedConv2d" in page
