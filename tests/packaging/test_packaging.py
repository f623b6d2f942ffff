"""What the packages contain, declare and import agrees."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from collections import Counter
from email import message_from_bytes
from functools import cache
from importlib.metadata import metadata, requires
from pathlib import Path

import pytest
from isolation import required_by
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name for path in ROOT.glob("packages/*/pyproject.toml"))
FAMILIES = ["fxopt-linear", "fxopt-norm", "fxopt-arith", "fxopt-cpu", "fxopt-simplify"]
RUN_TIME = {
    "fxopt-core": {"torch", "pluggy"},
    "fxopt-rewrite": {"fxopt-core"},
    "fxopt-checkpoints": {"fxopt-core", "fxopt-rewrite", "safetensors"},
    **{name: {"fxopt-rewrite"} for name in [*FAMILIES, "fxopt-tools"]},
    "fxopt-capture": {"fxopt-rewrite", "fxopt-tools"},
    "fxopt-compile": {"fxopt-rewrite", "fxopt-checkpoints", "fxopt-tools"},
    "fxopt-report": {"fxopt-rewrite", "fxopt-tools", "igraph"},
    "fxopt-testing": {"fxopt-checkpoints", "fxopt-capture", "fxopt-tools", "pytest"},
    "fxopt": {*(name for name in PACKAGES if name not in ("fxopt", "fxopt-report", "fxopt-testing")), "rich", "typer"},
}

(TRIED,) = re.findall(r"^Tried with (.+?)\.$", (ROOT / "README.md").read_text(encoding="utf-8"), re.M | re.S)
# What torch and transformers run of a distribution in every process: a user's file of its name must not hide it.
BESIDE = {"fxopt": ["_fxopt_entry_points"]}

for_each_package = pytest.mark.parametrize("name", PACKAGES)


def folder_of(name: str) -> Path:
    """Where a package's sources lie."""
    return ROOT / "packages" / name / "src" / name.replace("-", "_")


def declared(name: str, *, extras: bool = False) -> dict[str, Requirement]:
    """What an installed package requires, by name: at run time, or for its extras."""
    requirements = map(Requirement, requires(name) or ())
    return {each.name: each for each in requirements if ("extra ==" in str(each.marker)) is extras}


# --- What is declared


@for_each_package
def test_run_time_dependencies_are_those_agreed(name: str) -> None:
    """Another dependency is a decision: it belongs in docs/decisions.md and in this table."""
    assert declared(name).keys() == RUN_TIME[name]


@pytest.mark.parametrize(
    ("extra", "brought"), [("testing", {"fxopt-testing", "pytest"}), ("reports", {"fxopt-report", "igraph"})]
)
def test_what_few_users_need_comes_with_an_extra(extra: str, brought: set[str]) -> None:
    """Whoever optimizes models needs no test tools, and gets nothing that is under the GPL unasked."""
    assert not brought & required_by("fxopt")
    assert brought <= required_by(f"fxopt[{extra}]")


@for_each_package
def test_an_index_leads_to_the_project(name: str) -> None:
    """By the keyword under which people search, and by its addresses."""
    described = metadata(name)
    assert "fxopt" in str(described["Keywords"]).split(",")
    addresses = dict(str(line).split(", ", 1) for line in described.get_all("Project-URL", []))
    assert addresses.keys() == {"Homepage", "Documentation", "Issues", "Changelog"}
    assert addresses["Changelog"].endswith(f"/packages/{name}/CHANGELOG.md")


@for_each_package
def test_siblings_are_pinned_to_the_minor_version(name: str) -> None:
    """One package's patch release never forces another's, and a breaking release never slips in."""
    siblings = [each for extras in (False, True) for each in declared(name, extras=extras).values()]
    pins = {each.name: str(each.specifier) for each in siblings if each.name in PACKAGES}
    assert pins == dict.fromkeys(pins, "<0.2,>=0.1.0")


def test_torch_is_constrained_to_a_version_that_is_allowed() -> None:
    """CI installs the version of constraints.txt, and fxopt-core has to accept it."""
    constraint = Requirement((ROOT / "constraints.txt").read_text(encoding="utf-8").strip())
    (version,) = constraint.specifier
    assert declared("fxopt-core")["torch"].specifier.contains(version.version)


@pytest.mark.parametrize("python", ["3.10", "3.11", "3.12", "3.13"])
def test_everything_that_sessions_install_is_pinned(python: str) -> None:
    """To a version that is asked for, so that a new release elsewhere breaks nothing: `nox -s lock` pins."""
    lines = (ROOT / f".ci/constraints-{python}.txt").read_text(encoding="utf-8").splitlines()
    pinned = [Requirement(line) for line in lines if not line.startswith("#")]
    pins = {canonicalize_name(each.name): str(each.specifier)[2:] for each in pinned}
    project = pytest.importorskip("tomllib").loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    groups = project["dependency-groups"]
    if python == "3.10":  # the sessions with real models need a later one
        groups = {name: groups[name] for name in ("test", "processes", "wheels", "audit")}
    asked = [Requirement(each) for group in groups.values() for each in group if isinstance(each, str)]
    asked += [each for name in PACKAGES for each in declared(name).values() if each.name not in PACKAGES]
    for each in asked:
        if each.marker is None or each.marker.evaluate({"python_version": python}):
            assert pins[canonicalize_name(each.name)] in each.specifier, f"{each}: run `nox -s lock`"


# --- What is imported


IMPORTS = """
import os, sys, torch
before = set(sys.modules)
for name in sys.argv[1:]:
    if not os.fork():
        __import__(name)
        print(name, *set(sys.modules) - before, flush=True)
        os._exit(0)
    os.wait()
"""


@cache
def modules_loaded() -> dict[str, list[str]]:
    """The modules that each package loads in an interpreter that has imported torch alone, beyond what torch loads."""
    names = [name.replace("-", "_") for name in PACKAGES]
    done = subprocess.run([sys.executable, "-c", IMPORTS, *names], stdout=subprocess.PIPE, text=True, check=True)
    return {name: loaded for name, *loaded in map(str.split, done.stdout.splitlines())}


def loaded_by(name: str) -> set[str]:
    """The top-level modules that a package loads beyond what torch and Python bring."""
    return {module.partition(".")[0] for module in modules_loaded()[name]} - set(sys.stdlib_module_names)


@for_each_package
def test_importing_a_package_loads_what_it_stands_on(name: str) -> None:
    """No plugin, no other family, no extra: the registry is filled on first use, and the rest is lazy."""
    loaded = {module for module in loaded_by(name.replace("-", "_")) if not module.startswith("_")}
    loaded -= {"py"}  # a file of pytest's
    assert set(map(canonicalize_name, loaded)) <= required_by(name)


def test_importing_core_costs_little_beyond_torch() -> None:
    """Counted in modules, which do not vary with the machine: torch itself loads over a thousand."""
    loaded = set(modules_loaded()["fxopt_core"])
    own = [module for module in loaded if module.partition(".")[0] in ("fxopt_core", "pluggy")]
    assert len(loaded) - len(own) <= 10, sorted(loaded - set(own))
    assert len(own) <= 80


def test_the_one_import_for_users_is_lazy() -> None:
    assert loaded_by("fxopt") <= {"fxopt"}  # torch loads what opens folders of fxopt itself


# --- What is contained


@pytest.fixture
def wheel(name: str) -> zipfile.ZipFile:
    """The wheel of a package, as built by the session `wheels`."""
    directory = os.environ.get("FXOPT_WHEELS")
    if directory is None:
        pytest.skip("FXOPT_WHEELS names no directory of wheels: `nox -s together` builds them")
    (path,) = Path(directory).glob(f"{name.replace('-', '_')}-[0-9]*.whl")
    return zipfile.ZipFile(path)


@for_each_package
def test_the_wheel_holds_the_package_and_nothing_else(name: str, wheel: zipfile.ZipFile) -> None:
    """Stubs, data and licence included, tests not."""
    files = [file for file in wheel.namelist() if not file.endswith("/")]  # auditwheel lists folders too
    module = name.replace("-", "_")
    assert f"{module}/py.typed" in files
    assert any(re.fullmatch(rf"{module}-[^/]*\.dist-info/licenses/LICENSE", file) for file in files)
    folders = {re.sub(r"-[^-]*\.dist-info$", "", file.partition("/")[0]) for file in files}
    assert folders == {module, *BESIDE.get(name, ())}
    sources = {path for path in folder_of(name).rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    sources = {path for path in sources if not path.name.startswith("_kernels.so")}  # as build_inplace.py leaves it
    held = {file for file in files if file.startswith(f"{module}/") and not file.endswith("/_kernels.so")}
    assert held == {path.relative_to(folder_of(name).parent).as_posix() for path in sources}


@pytest.mark.parametrize("name", ["fxopt-cpu"])
def test_one_wheel_of_kernels_serves_every_python(wheel: zipfile.ZipFile) -> None:
    """It holds one library, for every instruction set, or none where there was no compiler."""
    (path,) = (file for file in wheel.namelist() if file.endswith(".dist-info/WHEEL"))
    built = "fxopt_cpu/_kernels.so" in wheel.namelist()
    tag = message_from_bytes(wheel.read(path))["Tag"]
    assert tag == "py3-none-any" if not built else re.fullmatch(r"py3-none-(?!any).+", tag)
    assert wheel.filename is not None
    assert Path(wheel.filename).stat().st_size < 2_000_000


@for_each_package
def test_the_wheel_presents_itself(name: str, wheel: zipfile.ZipFile) -> None:
    """What an index shows: a summary, a README, the licence, and the Pythons that CI tries and the README names."""
    (path,) = (file for file in wheel.namelist() if file.endswith(".dist-info/METADATA"))
    metadata = message_from_bytes(wheel.read(path))
    assert metadata["Name"] == name
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["Summary"]
    assert str(metadata.get_payload()).startswith(f"# {name}\n")
    prefix = "Programming Language :: Python :: 3."
    declared = {each.removeprefix(prefix) for each in metadata.get_all("Classifier", []) if each.startswith(prefix)}
    jobs = (ROOT / ".github" / "workflows" / "ci.yml").read_text(encoding="utf-8").partition("  tests:\n")[2]
    assert declared == set(re.findall(r'"3\.(\d+)"', jobs)) == set(re.findall(r"\b3\.(\d+)", TRIED))


def test_the_versions_of_torch_that_are_tried_are_told() -> None:
    """In the README and where an untried torch lacks something: that of CI, and the newest that was tried."""
    (fixed,) = re.findall(r"^torch==(\d+\.\d+)", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.M)
    first, last = re.findall(r"torch (\d+\.\d+) and (\d+\.\d+)", TRIED)[0]
    assert first == fixed
    assert f"tested with ({first} and {last})" in (folder_of("fxopt-core") / "_torch.py").read_text(encoding="utf-8")


@for_each_package
def test_the_licence_is_that_of_the_whole(name: str) -> None:
    """Each distribution carries its copy."""
    assert (ROOT / "packages" / name / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()


@for_each_package
def test_the_changelog_has_the_version(name: str) -> None:
    """A version without an entry is not ready for release, and the site shows all changelogs."""
    (version,) = re.findall(r'^__version__ = "(.+)"$', (folder_of(name) / "__init__.py").read_text("utf-8"), re.M)
    changelog = (ROOT / "packages" / name / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## {re.escape(version)}\b", changelog, re.M)
    assert f"packages/{name}/CHANGELOG.md" in (ROOT / "docs" / "changelogs.md").read_text(encoding="utf-8")


# --- What keeps the tools working


def test_test_files_have_unique_names() -> None:
    """mypy takes one file of a name in one run; only pytest's own `conftest.py` may recur."""
    places = ("tests/**/*.py", "packages/*/tests/**/*.py", "docs/examples/*/tests/**/*.py")
    names = Counter(path.name for place in places for path in ROOT.glob(place))
    assert not {name for name, count in names.items() if count > 1} - {"conftest.py", "__init__.py"}


def test_mypy_knows_the_sources_of_every_package() -> None:
    """`mypy_path` of pyproject.toml takes no pattern, so a new package has to be listed."""
    settings = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert not [name for name in PACKAGES if f"/packages/{name}/src" not in settings]


# --- What others load


SCRIPT = """
import torch, transformers
transformers.AutoModel
print(torch.compile(torch.nn.Linear(2, 3), backend="fxopt")(torch.ones(1, 2)).shape)
"""


@pytest.mark.parametrize("shadows", [("fxopt",), ("fxopt", "fxopt_core", "fxopt_capture")])
def test_torch_and_transformers_work_beside_files_of_our_names(shadows: tuple[str, ...], tmp_path: Path) -> None:
    """What is left of a half-removed fxopt is like such files: nothing of it can be imported, and it is not tried."""
    pytest.importorskip("transformers")
    metadata = tmp_path / "fxopt-0.1.0.dist-info"  # as this tree declares it: that of the environment may be older
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: fxopt\nVersion: 0.1.0\n")
    declared = (
        (ROOT / "packages/fxopt/pyproject.toml").read_text(encoding="utf-8").partition("[project.entry-points.")[2]
    )
    points = declared.partition("[tool.")[0].replace("project.entry-points.", "").replace('"', "")
    (metadata / "entry_points.txt").write_text(f"[{points}")
    for name in shadows:
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported')\n")
    (tmp_path / "script.py").write_text(SCRIPT if len(shadows) == 1 else "\n".join(SCRIPT.splitlines()[:-1]))
    sources = os.pathsep.join([str(tmp_path), *map(str, ROOT.glob("packages/*/src"))])
    command = [sys.executable, "-W", "error::RuntimeWarning:_fxopt_entry_points", str(tmp_path / "script.py")]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": sources}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert len(shadows) > 1 or done.stdout == "torch.Size([1, 3])\n"
