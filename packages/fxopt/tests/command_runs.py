"""How tests run the command: in this process, or as one of its own."""

from __future__ import annotations

import importlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from fxopt.commands.main import build_app
from fxopt_core import Registry

_APP = build_app(plain=True)
MODELS = Path(__file__).parent


def fxopt(*arguments: object, code: int = 0) -> Result:
    """Run the command in this process; its exit code has to be this one."""
    result = CliRunner().invoke(_APP, [str(argument) for argument in arguments])
    assert result.exit_code == code, f"{result.exit_code}: {result.output}"
    return result


def fxopt_json(*arguments: object, code: int = 0) -> Any:
    """Run the command with ``--json``; return what it prints."""
    return json.loads(fxopt(*arguments, "--json", code=code).stdout)


class _Screen(io.StringIO):
    def isatty(self) -> bool:
        return True


def on_screen(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[object, str]:
    """Run the command in this process as in a terminal; return its exit code and what it shows."""
    screen = _Screen()
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, screen)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("NO_COLOR", raising=False)
    with pytest.raises(SystemExit) as caught:
        build_app(plain=False)(arguments)
    return caught.value.code, screen.getvalue()


def environment(**extra: str) -> dict[str, str]:
    """Return an environment in which `command_models` can be imported."""
    path = os.pathsep.join([str(MODELS), *filter(None, [os.environ.get("PYTHONPATH")])])
    return os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | extra


def process(*arguments: object, folder: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """Run the command in a process of its own, without a terminal."""
    command = [sys.executable, "-m", "fxopt", *map(str, arguments)]
    return subprocess.run(
        command, cwd=folder, env=environment(**extra), capture_output=True, text=True, stdin=subprocess.DEVNULL
    )


def use_registry(monkeypatch: pytest.MonkeyPatch, registry: Registry) -> Registry:
    """Let this be the registry of the process for the time of a test."""
    monkeypatch.setattr(importlib.import_module("fxopt_core.registry.registry"), "_PROCESS_REGISTRY", registry)
    return registry
