"""The command as a process: its script, signals, terminals, imports, plugins of other distributions."""

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
from command_runs import environment, process

ATTENTION = "command_models:attention"
posix = pytest.mark.skipif(sys.platform == "win32", reason="signals and terminals of POSIX")


def test_the_script_is_installed() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="fxopt")
    assert script.value == "fxopt.commands.main:main"
    assert callable(script.load())
    path = Path(sys.executable).with_name("fxopt")
    if path.exists():
        result = subprocess.run([path, "--version"], capture_output=True, text=True, env=environment())
        assert result.stdout.startswith("fxopt ")


def test_optimize_without_a_terminal(tmp_path: Path) -> None:
    result = process("optimize", ATTENTION, "-p", "merge-linears", "-o", "out.fxopt", folder=tmp_path)
    assert result.returncode == 0, result.stderr
    assert "\x1b" not in result.stdout + result.stderr
    assert "+ q + k + v -> q_k_v_merged" in result.stdout
    assert result.stderr == ""


def test_help_is_plain_without_a_terminal(tmp_path: Path) -> None:
    result = process("--help", folder=tmp_path)
    assert result.returncode == 0
    assert result.stdout.isascii()
    assert process("lisst", folder=tmp_path).returncode == 2


def test_importing_fxopt_loads_nothing_of_the_command() -> None:
    script = (
        "import sys, fxopt, fxopt.optimization; "
        "assert not {'typer', 'rich', 'fxopt.commands'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-W", "ignore", "-c", script], check=True, env=environment())


def test_a_broken_plugin_of_another_distribution_is_listed(tmp_path: Path) -> None:
    info = tmp_path / "fxopt_wrecked-3.1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fxopt-wrecked\nVersion: 3.1\n")
    (info / "entry_points.txt").write_text("[fxopt]\nwrecked = fxopt_wrecked.plugin\n")
    (tmp_path / "fxopt_wrecked.py").write_text("raise RuntimeError('wrecked')\n")
    path = os.pathsep.join([str(tmp_path), environment()["PYTHONPATH"]])
    result = process("list", "--json", folder=tmp_path, PYTHONPATH=path)
    (failed,) = json.loads(result.stdout)["failed"]
    assert failed["plugin"] == "wrecked"
    assert "fxopt-wrecked 3.1" in failed["error"]
    assert failed["cause"] == "RuntimeError: wrecked"


@posix
@pytest.mark.parametrize(("sent", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
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
    def test_colours_and_frames(self, tmp_path: Path) -> None:
        code, shown = in_terminal(tmp_path, "list", "--family", "linear")
        assert code == 0
        assert "\x1b[" in shown
        assert "─" in shown

    @pytest.mark.parametrize(("answer", "code"), [("n\n", 3), ("y\n", 0), ("\x03", 130)])
    def test_an_output_that_exists_is_asked_about(self, tmp_path: Path, answer: str, code: int) -> None:
        (tmp_path / "out.fxopt").write_text("mine")
        found, shown = in_terminal(tmp_path, "optimize", ATTENTION, "-o", "out.fxopt", answer=answer)
        assert found == code, shown
        assert "out.fxopt exists. Replace it?" in shown
        assert "Traceback" not in shown
        assert ((tmp_path / "out.fxopt").read_bytes() == b"mine") == (code != 0)
        for progress in ("loading torch", "capturing", "saving", " left", "\x1b["):
            assert progress in shown or code != 0


COMPLETED = {
    "fxopt op": "optimize",
    "fxopt show merge-l": "merge-linears",
    "fxopt optimize x -p inference,merge-l": "inference,merge-linears",
    "fxopt list --family n": "norm",
    "fxopt optimize x --exp": "--expect",
}
SHELL = """
import contextlib, os, sys
from fxopt.commands.main import build_app
for typed in sys.argv[1:]:
    os.environ.update(_FXOPT_COMPLETE="complete_bash", COMP_WORDS=typed, COMP_CWORD=str(len(typed.split()) - 1))
    with contextlib.suppress(SystemExit):
        build_app(plain=True)(args=[], prog_name="fxopt")
    print(end=";", flush=True)
"""


def test_shells_complete(tmp_path: Path) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SHELL, *COMPLETED]
    result = subprocess.run(command, cwd=tmp_path, env=environment(), capture_output=True, text=True)
    assert [found.split() for found in result.stdout.split(";")] == [*([word] for word in COMPLETED.values()), []]
