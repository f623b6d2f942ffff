"""`fxopt view` in a browser."""

from __future__ import annotations

import tempfile
import webbrowser
from pathlib import Path

import pytest
from command_runs import fxopt, fxopt_json


def test_a_page_is_opened_or_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []

    def browse(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    monkeypatch.setattr(webbrowser, "open", browse)
    fxopt("optimize", "command_models:attention", "-p", "merge-linears", "-o", "after.fxopt")
    page = fxopt("view", "after.fxopt").stdout.splitlines()[-1]
    assert "q_k_v_merged" in Path(page).read_text(encoding="utf-8")
    assert fxopt_json("view", "after.fxopt", "-o", "after.html") == {"page": "after.html", "opened": False}
    assert Path("after.html").read_text(encoding="utf-8") == Path(page).read_text(encoding="utf-8")
    assert opened == [Path(page).as_uri()]
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert "choose a file with -o FILE.html" in fxopt("view", "after.fxopt", code=3).stderr
