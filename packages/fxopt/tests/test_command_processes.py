"""The command as a process: its script, signals, terminals."""

from __future__ import annotations

import importlib.metadata
import json
import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from command_runs import environment, on_screen, process

ATTENTION = "command_models:attention"
OPTIMIZE = ("optimize", ATTENTION, "-p", "merge-linears", "-o", "out.fxopt")
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and terminals of POSIX")


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


@posix
@pytest.mark.parametrize(
    ("sent", "code"),
    [
        (signal.SIGINT, 130),
        # By day, `test_an_interrupt_is_one_whatever_becomes_of_it` has it.
        pytest.param(signal.SIGTERM, 143, marks=pytest.mark.nightly),
    ],
)
def test_signals_leave_nothing_half_written(tmp_path: Path, sent: signal.Signals, code: int) -> None:
    (tmp_path / "out.fxopt").write_text("mine")
    command = [sys.executable, "-m", "fxopt", "optimize", "command_models:waits", "-o", "out.fxopt", "--force"]
    started = subprocess.Popen(
        command,
        cwd=tmp_path,
        env=environment(),
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background has it ignored
    )
    try:
        while not (tmp_path / "waiting").exists():
            assert started.poll() is None
            time.sleep(0.05)
        started.send_signal(sent)
        _, errors = started.communicate(timeout=60)
    finally:
        started.kill()
    assert started.returncode == code
    assert "Traceback" not in errors
    assert (tmp_path / "out.fxopt").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out.fxopt", "waiting"]


def in_terminal(folder: Path, *arguments: str, answer: str = "") -> tuple[int, str]:
    """Run the command in a terminal of its own; type an answer when asked. Return its exit code and what it shows."""
    import fcntl
    import pty
    import termios

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)  # so that Ctrl-C reaches it
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a job in the background has it ignored

    ours, theirs = pty.openpty()
    started = subprocess.Popen(
        [sys.executable, "-m", "fxopt", *arguments],
        cwd=folder,
        env=environment(TERM="xterm-256color", COLUMNS="120"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=take_terminal,
    )
    os.close(theirs)
    shown, end = "", time.monotonic() + 120
    try:
        while (part := _read(ours)) is not None and time.monotonic() < end:
            shown += part
            if not part and "Replace it?" in shown:  # silent: it listens
                os.write(ours, answer.encode())
                answer = ""
        return started.wait(60), shown
    finally:
        started.kill()
        os.close(ours)


def _read(terminal: int) -> str | None:
    """Return what is shown, nothing if that takes more than a second, None at the end."""
    if not select.select([terminal], [], [], 1)[0]:
        return ""
    try:
        return os.read(terminal, 4096).decode(errors="replace") or None
    except OSError:  # how Linux tells that the other side is closed
        return None


@posix
class TestTerminal:
    @pytest.mark.parametrize(
        ("answer", "code"),
        [
            ("n\n", 3),
            pytest.param("y\n", 0, marks=pytest.mark.nightly),  # by day, the test below has it
            ("\x03", 130),
        ],
    )
    def test_an_output_that_exists_is_asked_about(self, tmp_path: Path, answer: str, code: int) -> None:
        (tmp_path / "out.fxopt").write_text("mine")
        found, shown = in_terminal(tmp_path, *OPTIMIZE, answer=answer)
        assert found == code, shown
        assert "out.fxopt exists. Replace it?" in shown
        assert "Traceback" not in shown
        assert ((tmp_path / "out.fxopt").read_bytes() == b"mine") == (code != 0)
        for progress in ("loading torch", "capturing", "saving", " left", "\x1b["):
            assert progress in shown or code != 0


def test_progress_is_shown_once_an_output_may_be_replaced(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("out.fxopt").write_text("mine")
    code, shown = on_screen(monkeypatch, *OPTIMIZE, typed="y\n")
    assert code == 0, shown
    assert "out.fxopt exists. Replace it?" in shown
    assert Path("out.fxopt").read_bytes() != b"mine"
    for progress in ("loading torch", "capturing", "saving", " left", "\x1b["):
        assert progress in shown
