"""The template for plugins: what it generates is checked, built, installed as a wheel, and passes its tests."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

copier = pytest.importorskip("copier", reason="the group `template` of pyproject.toml is not installed")
pytest.importorskip("hatchling", reason="the group `template` of pyproject.toml is not installed")
pytest.importorskip("fxopt_testing", reason="the generated tests use it")

ROOT = Path(__file__).parents[2]
TEMPLATE = ROOT / "docs" / "template"
EXAMPLE = ROOT / "docs" / "examples" / "fxopt-attention"
WORKFLOWS = (".github/workflows/ci.yml", ".github/workflows/release.yml")
ANSWERS = {
    "distribution": "fxopt-two-words",
    "pass_class": "DropNothing",
    "author": "Ä. Nonymous",
    "description": "None.",
}


def generated(place: Path, **answers: str) -> Path:
    """Generate a distribution, with the defaults for what is not answered."""
    copier.run_copy(str(TEMPLATE), place, data=answers, defaults=True, quiet=True)
    return place


def run(*command: str, cwd: Path, **environment: str) -> str:
    """Run a module of Python; the output is shown where it fails."""
    settings = {**os.environ, **environment}
    done = subprocess.run([sys.executable, "-m", *command], cwd=cwd, env=settings, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def sources() -> list[str]:
    """Where the modules lie that this process imports, for mypy and for child processes."""
    return [path for path in sys.path if path and Path(path).is_dir()]


@pytest.mark.parametrize(
    ("answers", "chosen", "count"),
    [
        pytest.param({}, "", 30, id="defaults", marks=pytest.mark.nightly),
        pytest.param(ANSWERS, "not conformance or constructible or named", 4, id="answers"),
    ],
)
def test_what_it_generates_passes_its_tests(tmp_path: Path, answers: dict[str, str], chosen: str, count: int) -> None:
    """As a wheel, built by what its pyproject.toml names, beside the packages that are installed.

    By day with those of the kit's properties that need no models; each night with all.
    """
    place, site = generated(tmp_path / "plugin", **answers), tmp_path / "site"
    options = ("--no-deps", "--no-index", "--no-build-isolation", "--disable-pip-version-check", "--quiet")
    run("pip", "install", *options, "--target", str(site), ".", cwd=place)
    (wheel,) = site.glob("*.dist-info/METADATA")
    assert f"Name: {answers.get('distribution', 'fxopt-mine')}\n" in wheel.read_text(encoding="utf-8")
    assert list(site.glob("*/py.typed"))
    path = os.pathsep.join([str(site), *sources()])
    told = run("pytest", "-q", "-p", "no:cacheprovider", "-k", chosen, cwd=place, PYTHONPATH=path)
    passed = re.search(r"^(\d+) passed[, ]", told, re.M)
    assert passed is not None, told
    assert int(passed.group(1)) > count


@pytest.mark.parametrize("answers", [{}, ANSWERS], ids=["defaults", "answers"])
def test_ruff_finds_nothing(tmp_path: Path, answers: dict[str, str]) -> None:
    """By the settings that it brings, so that its CI begins green."""
    pytest.importorskip("ruff", reason="the group `lint` of pyproject.toml is not installed")
    place = generated(tmp_path / "plugin", **answers)
    run("ruff", "check", "--no-cache", cwd=place)
    run("ruff", "format", "--check", "--no-cache", cwd=place)


@pytest.mark.nightly
def test_mypy_finds_nothing(tmp_path: Path) -> None:
    """By the settings that it brings: strict, and the plugin is what the registry takes."""
    pytest.importorskip("mypy", reason="the group `types` of pyproject.toml is not installed")
    place = generated(tmp_path / "plugin", **ANSWERS)
    run("mypy", "src", "tests", cwd=place, MYPYPATH=os.pathsep.join(map(str, ROOT.glob("packages/*/src"))))


@pytest.mark.parametrize(
    ("question", "answer"),
    [("distribution", "Fxopt_Mine"), ("distribution", "mine-"), ("pass_class", "drop"), ("description", 'a "b"')],
)
def test_wrong_answers_are_refused(tmp_path: Path, question: str, answer: str) -> None:
    """Rather than made into a distribution that nothing can build."""
    with pytest.raises(ValueError, match=f"'{question}'"):
        generated(tmp_path / "plugin", **{question: answer})


@pytest.mark.parametrize("path", WORKFLOWS)
def test_the_example_has_the_workflows_of_the_template(path: str) -> None:
    """One text, kept twice."""
    assert (EXAMPLE / path).read_bytes() == (TEMPLATE / "project" / path).read_bytes()
