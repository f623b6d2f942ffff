"""`fxopt view` in a browser, and `fxopt optimize --times`."""

from __future__ import annotations

import tempfile
import urllib.error
import urllib.request
import webbrowser
from pathlib import Path

import pytest
from command_runs import fxopt, fxopt_json

ATTENTION = "command_models:attention"


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An archive, with the times that were measured in its report."""
    made, page = tmp_path / "after.fxopt", tmp_path / "after.html"
    arguments = ("optimize", ATTENTION, "-p", "merge-linears", "-o", made, "--times", "--report", page)
    times = fxopt_json(*arguments)["times"]
    assert {name: len(seconds) for name, seconds in times.items()} == {"original": 30, "transformed": 30}
    assert "Time of a call" in page.read_text(encoding="utf-8")
    return made


def test_a_page_is_served_once_and_leaves_nothing(
    archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetched: list[str] = []
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()

    def browse(url: str) -> bool:
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(url[:-4])  # what another user may guess
        with urllib.request.urlopen(url) as answer:
            fetched.append(answer.read().decode())
        return True

    monkeypatch.setattr(webbrowser, "open", browse)
    assert "shown in the browser" in fxopt("view", archive).stdout
    assert "q_k_v_merged" in fetched[0]
    assert not list((tmp_path / "temporary").iterdir())
    monkeypatch.setattr(webbrowser, "open", lambda url: False)
    assert "write it to a file instead: -o FILE.html" in fxopt("view", archive, code=3).stderr
