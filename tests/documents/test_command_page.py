"""The page of the command says what the command does; reasons for refusal are those that tests provoke."""

from __future__ import annotations

import re
from pathlib import Path

from fxopt.commands.failures import ExitCode
from fxopt.commands.main import build_app
from fxopt_core import registry

PAGE = (Path(__file__).parents[2] / "docs" / "command.md").read_text(encoding="utf-8")


def test_all_exit_codes_are_documented() -> None:
    assert set(map(int, re.findall(r"^\| (\d+) \|", PAGE, re.MULTILINE))) == set(map(int, ExitCode))


def test_all_commands_are_documented() -> None:
    names = {command.name for command in build_app(plain=True).registered_commands}
    assert names == set(re.findall(r"^\| \[`fxopt (\w+)", PAGE, re.MULTILINE))


def test_every_pass_that_refuses_shows_reasons() -> None:
    for info in registry().available().values():
        refuses = info.family != "core" and not info.transformation.replaces_code_generator
        assert bool(info.transformation.reasons) == refuses
