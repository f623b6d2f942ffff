"""The command as a process: its script, interrupts, terminals."""

from __future__ import annotations

import importlib.metadata
import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_runs import environment, on_screen, process

ATTENTION = "command_models:attention"


def test_the_script_is_installed() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="fxopt")
    assert script.value == "fxopt.commands.main:main"
    assert callable(script.load())
    path = Path(sys.executable).with_name("fxopt")
    if path.exists():
        result = subprocess.run([path, "--version"], capture_output=True, text=True, env=environment())
        assert result.stdout.startswith("fxopt ")


ONE_BY_ONE = """
import json, sys
from fxopt.commands.main import main
for arguments in json.loads(sys.argv[1]):
    sys.argv = ["fxopt", *arguments]
    try:
        main()
    except SystemExit as ended:
        print(ended.code or 0)
    for stream in (sys.stdout, sys.stderr):
        print(end="\\0", file=stream, flush=True)
"""


def test_optimize_without_a_terminal(tmp_path: Path) -> None:
    """Torch logs what it cannot guard on, and a traceback for each attempt to export; what is handled is not shown."""
    sources = ATTENTION, "command_models:branching", "command_models:five_for_four"
    commands = [["optimize", source, "-p", "merge-linears", "-o", "out.fxopt", "--force"] for source in sources]
    command = [sys.executable, "-W", "ignore", "-c", ONE_BY_ONE, json.dumps(commands)]
    result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert "\x1b" not in result.stdout + result.stderr
    done, *codes = result.stdout.split("\0")
    assert "+ q + k + v -> q_k_v_merged" in done
    assert (done.splitlines()[-1], codes) == ("0", ["4\n", "4\n", ""])
    silent, branching, wrong_size, _ = result.stderr.split("\0")
    assert silent == ""
    assert branching.startswith("error: Branching cannot be captured")
    assert wrong_size.startswith("error: Linear cannot be captured: RuntimeError: a and b must have same reduction dim")
    assert len(wrong_size.splitlines()) == 1


def test_help_is_plain_without_a_terminal(tmp_path: Path) -> None:
    result = process("--help", folder=tmp_path)
    assert result.returncode == 0
    assert result.stdout.isascii()
    assert process("lisst", folder=tmp_path).returncode == 2


@pytest.mark.skipif(sys.platform == "win32", reason="signals of POSIX")
def test_an_interrupt_leaves_nothing_half_written(tmp_path: Path) -> None:
    (tmp_path / "out.fxopt").write_text("mine")
    command = [sys.executable, "-m", "fxopt", "optimize", "command_models:waits", "-o", "out.fxopt", "--force"]
    started = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # ignored in the background
    )
    try:
        while not (tmp_path / "waiting").exists():
            assert started.poll() is None
            time.sleep(0.05)
        started.send_signal(signal.SIGINT)
        _, errors = started.communicate(timeout=60)
    finally:
        started.kill()
    assert (started.returncode, errors) == (130, "error: interrupted; no file was left half-written\n")
    assert (tmp_path / "out.fxopt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.fxopt", "waiting"]


def test_progress_is_shown_in_a_terminal(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, shown = on_screen(monkeypatch, "optimize", ATTENTION, "-p", "merge-linears", "-o", "out.fxopt")
    assert code == 0, shown
    for progress in ("capturing", "\x1b["):
        assert progress in shown
