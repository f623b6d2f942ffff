"""What the command answers before torch is imported, which takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_runs import environment, fxopt

_RUN = """
import json, sys
from typer.testing import CliRunner
from fxopt.commands.main import build_app
app = build_app(plain=True)
found = [CliRunner().invoke(app, line) for line in json.load(sys.stdin)]
json.dump([[each.exit_code, each.output] for each in found], sys.stdout)
assert "torch" not in sys.modules
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no FIFOs")
def test_errors_about_files_do_not_wait_for_torch(tmp_path: Path) -> None:
    (tmp_path / "notes.pt2").write_text("notes")
    (tmp_path / "half.pt2").write_bytes(b"PK\x03\x04 and no more")
    for name, config in (("empty", None), ("broken", "{"), ("fifo", "{}")):
        (tmp_path / name).mkdir()
        if config is not None:
            (tmp_path / name / "config.json").write_text(config)
    os.mkfifo(tmp_path / "fifo" / "model.safetensors")
    cases = {
        ("history", "nowhere.pt2"): "there is no file or folder 'nowhere.pt2'",
        ("bench", "nowhere/model.pt2"): "there is no file or folder 'nowhere/model.pt2'; expected a .pt2 archive",
        ("history", "notes.pt2"): "'notes.pt2' is no archive (File is not a zip file)",
        ("undo", "half.pt2", "-o", "out.pt2"): "'half.pt2' is cut off or damaged",
        ("view", "empty"): "'empty' is a directory, and no file",
        ("optimize", "empty", "-o", "out.pt2"): "empty has no config.json",
        ("bench", "broken"): "broken/config.json is not valid JSON",
        ("tune", "fifo"): "fifo/model.safetensors is a FIFO",
        ("verify", "notes.pt2", "half.pt2"): "'notes.pt2' is no archive",
        ("bisect", "no_such_module:make"): "there is no module 'no_such_module'",
        ("reproduce", "nowhere.zip"): "is no reproducer",
    }
    arguments = [sys.executable, "-W", "ignore", "-c", _RUN]
    lines = json.dumps(list(cases))
    done = subprocess.run(arguments, input=lines, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (code, output), (line, words) in zip(json.loads(done.stdout), cases.items(), strict=True):
        assert (code, words in output) == (3, True), (line, output)


def test_summaries_of_commands_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    output = fxopt("--help").stdout
    summaries = output.partition("Commands:")[2].strip().splitlines()
    assert len(summaries) >= 12
    assert all(line.endswith(".") and not line.endswith("...") for line in summaries)
