"""What the command answers before torch is imported, which takes seconds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from command_runs import environment
from typer.testing import CliRunner

from fxopt.commands.main import build_app

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
    for name, config in (("empty", None), ("broken", "{"), ("fifo", "{}")):
        (tmp_path / name).mkdir()
        if config is not None:
            (tmp_path / name / "config.json").write_text(config)
    os.mkfifo(tmp_path / "fifo" / "model.safetensors")
    cases = {
        ("history", "nowhere.fxopt"): "there is no file or folder 'nowhere.fxopt'",
        ("bench", "nowhere/model.fxopt"): "there is no file or folder 'nowhere/model.fxopt'; expected a .fxopt archive",
        ("view", "empty"): "'empty' is a directory, and no file",
        ("optimize", "empty", "-o", "out.fxopt"): "empty has no config.json",
        ("bench", "broken"): "broken/config.json is not valid JSON",
        ("bench", "fifo"): "fifo/model.safetensors is a FIFO",
    }
    arguments = [sys.executable, "-W", "ignore", "-c", _RUN]
    lines = json.dumps(list(cases))
    done = subprocess.run(arguments, input=lines, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for (code, output), (line, words) in zip(json.loads(done.stdout), cases.items(), strict=True):
        assert (code, words in output) == (3, True), (line, output)


@pytest.mark.parametrize("plain", [True, False])
def test_summaries_of_commands_are_whole(plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At 80 columns, in a terminal and elsewhere."""
    monkeypatch.setenv("COLUMNS", "80")
    output = CliRunner().invoke(build_app(plain=plain), ["--help"]).stdout.partition("Commands")[2]
    lines = [line.strip("│ ") for line in output.splitlines()[1:] if line.strip("─╭╮╰╯│ \n")]
    assert len(lines) == 10
    assert all(line.endswith(".") and not line.endswith("...") for line in lines)
