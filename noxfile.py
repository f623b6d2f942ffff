"""fxopt's sessions: `nox -l` lists them, `nox` runs the tests.

What follows `--` goes to the session's tool: `nox -s tests -- -k merge`, `nox -s build -- fxopt-core`.
One package's tests: `nox -s "alone(fxopt-core)"`. Environments are made anew unless told otherwise (`nox -r`).

Torch is large, so it is installed once per Python version into a directory of its own, which the environments see
through a `.pth` file. It holds torch and what torch itself depends on, and nothing else: no undeclared dependency slips
in with it. The sessions `alone` share pytest in the same way.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from zipfile import ZipFile

import nox

nox.needs_version = ">=2026.10.20"  # several sessions at once
nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "virtualenv"  # uv does not look where pip may find a CPU build of torch
nox.options.error_on_external_run = True

ROOT = Path(__file__).parent
PYPROJECT = nox.project.load_toml(ROOT / "pyproject.toml")
GROUPS = list(PYPROJECT["dependency-groups"])
PACKAGES = {path.parent.name: path.parent for path in sorted(ROOT.glob("packages/*/pyproject.toml"))}
EXAMPLES = {path.parent.name: path.parent for path in sorted(ROOT.glob("docs/examples/*/pyproject.toml"))}
DISTRIBUTIONS = EXAMPLES | PACKAGES  # those with the longest tests first
# Each of pytest's processes has models in memory, and takes whole files: what their tests share is made once. Files are
# taken as they are named: long ones first, so that no process waits for another's last.
IN_PROCESSES = ("--numprocesses=auto", "--maxprocesses=4", "--dist=loadfile", "--no-loadscope-reorder")
# Models come from packages: nothing may wait for a hub. Nothing but the session's environment may be imported. Python
# keeps what it compiles.
ENVIRONMENT = {"HF_HUB_OFFLINE": "1", "PYTHONPATH": "", "PYTHONNOUSERSITE": "1", "PYTHONDONTWRITEBYTECODE": ""}
# Most tests capture models of one or two layers with sizes that vary, where torch's cache of fake tensors costs a
# quarter of the time. It pays in deep models and with fixed sizes, so that it stays on in `nightly` and for users.
SHALLOW = {"TORCH_FAKE_TENSOR_DISPATCH_CACHE": "0"}
# The library that a C++ compiler makes; where there is none, the wheel lacks it.
KERNELS = "fxopt_cpu/_kernels.so"
# The supported versions of Python, each with the groups that are pinned for it. Models and documents have left 3.10.
PYTHONS = {"3.10": ["test", "processes", "wheels", "audit"]} | dict.fromkeys(("3.11", "3.12", "3.13"), GROUPS)
PINS = f".ci/constraints-{sys.version_info.major}.{sys.version_info.minor}.txt"
# What the session `newest` takes in its newest release, and the tests beside those of the packages that it runs.
NEWEST = ("torch", "transformers", "safetensors", "sentence-transformers", "timm", "accelerate", "peft")
ON_NEWEST = (
    "documents",
    "readme",
    "clients",
    "drop_ins",
    "live_models",
    "sentence_transformers",
    "verify_transformers",
)
# Names those of the packages given that the installed transformers does not work with, and what it asks for.
MISFITS = """
import sys
from importlib.metadata import version
from packaging.requirements import Requirement
from transformers.dependency_versions_table import deps
for name in sys.argv[1:]:
    if name in deps and version(name) not in Requirement(deps[name]).specifier:
        print(f"{name} {version(name)}: transformers {version('transformers')} asks for {deps[name]}")
"""


# The longest first: the others run beside it.
@nox.session(venv_backend="none", requires=["together", "readme", "alone"])
def tests(session: nox.Session) -> None:
    """Each package alone, then the tests of all together with real models, documents and docstring examples."""
    session.log("every package works alone, and all pass their tests together")


@nox.session(requires=["torch", "tools", "wheels"])
@nox.parametrize("name", [nox.param(name, id=name) for name in DISTRIBUTIONS])
def alone(session: nox.Session, name: str) -> None:
    """One package with only what it declares (as wheels): every module is imported, every pass runs its example."""
    isolate(session, name, whole=name in EXAMPLES)  # `together` has no room for them: it tests what fxopt ships


@nox.session(requires=["torch", "tools", "wheels"])
@nox.parametrize("name", [nox.param(name, id=name) for name in PACKAGES])
def isolated(session: nox.Session, name: str) -> None:
    """All tests of one package with only what it declares, pytest, pytest-xdist and hypothesis; part of `nightly`."""
    isolate(session, name, whole=True)


@nox.session(requires=["torch", "wheels"])
def together(session: nox.Session) -> None:
    """The tests of all packages and of the whole, with real models, docstring examples and documents."""
    install(session, ["test", "processes", "documents", "reports", "serving", "template"], PACKAGES)
    install_models(session)
    modules = [Path(path).parent.name for path in glob("packages/*/src/*/__init__.py")]
    options = (*IN_PROCESSES, "--doctest-modules", "--pyargs")
    run_pytest(session, *options, "tests", *glob("packages/*/tests"), *modules, threads=1, settings=SHALLOW)


@nox.session(requires=["wheels"])
def newest(session: nox.Session) -> None:
    """Packages, drop-ins and documents with the newest torch, transformers and libraries around them.

    What the newest transformers does not work with is left out, and named.
    """
    # Asked of pip, which is not always the newest that the index has: pip may be constrained.
    options = ("--dry-run", "--ignore-installed", "--no-deps", "--quiet", "--report", "-")
    printed = str(session.run("python", "-m", "pip", "install", *options, *NEWEST, silent=True))
    chosen = [each["metadata"] for each in json.loads(printed[printed.index("{") :])["install"]]
    versions = {str(each["name"]).lower(): str(each["version"]) for each in chosen}
    directory = torch_directory(session, versions["torch"])
    share_torch(session, directory, f"torch=={versions['torch']}")
    see(session, directory)
    files = [str(wheel_of(session, name)) for name in PACKAGES]
    groups = requirements("test", "processes", "documents", "models")
    others = [each for each in groups if name_of(each) not in NEWEST]
    session.install(f"transformers=={versions['transformers']}", *others, *files)
    # They also ask for a torchvision that matches its torch.
    others = [each for each in requirements("models-without-dependencies") if name_of(each) not in NEWEST]
    session.install("--no-deps", *others, *(f"{name}=={versions[name]}" for name in NEWEST if name != "torch"))
    for line in str(session.run("python", "-c", MISFITS, *NEWEST, silent=True)).splitlines():
        session.warn(f"left out: {line}")
        del versions[name_of(line)]
        session.run("python", "-m", "pip", "uninstall", "--quiet", "--yes", name_of(line))
    session.log("tried: " + ", ".join(f"{name} {version}" for name, version in versions.items()))
    run_pytest(session, *IN_PROCESSES, *glob("packages/*/tests"), *files_of_tests(*ON_NEWEST), threads=1)


@nox.session
def lock(session: nox.Session) -> None:
    """Pin what sessions install, for each supported Python, in .ci/: `nox -s lock -- --upgrade` takes newer releases.

    uv resolves, and installs nothing.
    """
    install_pinned(session, *requirements("lock"))
    projects = [nox.project.load_toml(folder / "pyproject.toml")["project"] for folder in DISTRIBUTIONS.values()]
    needed = {each for project in projects for each in project["dependencies"] if name_of(each) not in DISTRIBUTIONS}
    wanted = Path(session.create_tmp(), "wanted.txt")
    for version, groups in PYTHONS.items():
        wanted.write_text("\n".join([*requirements(*groups), *sorted(needed)]), encoding="utf-8")
        options = ("--quiet", "--python-version", version, "--no-annotate", "--custom-compile-command", "nox -s lock")
        files = ("--constraints", "constraints.txt", "--output-file", f".ci/constraints-{version}.txt", str(wanted))
        session.run("uv", "pip", "compile", *options, *session.posargs, *files)


@nox.session(requires=["torch", "wheels", "isolated"])
def nightly(session: nox.Session) -> None:
    """Models that CI leaves out, thousands of drawn models (others each time), faults, and damaged archives."""
    install(session, ["test", "processes", "documents", "ray", "spark", "template", "types"], PACKAGES)
    install_models(session)
    if not shutil.which("java") and shutil.which("apt-get") and os.geteuid() == 0:  # else Spark's test is skipped
        for arguments in (["update"], ["install", "-y", "--no-install-recommends", "default-jre-headless"]):
            session.run("apt-get", *arguments, external=True, silent=True, success_codes=range(256))
    run_pytest(session, *IN_PROCESSES, "-m", "nightly", "tests", *glob("packages/*/tests"), threads=1)
    drawn = files_of_tests("properties", "checkpoints_real", "hostile_ledgers", "faults", "checkpoint_faults")
    hostile = "packages/fxopt-capture/tests/test_archive_hostile.py"
    shared = (*IN_PROCESSES, "--dist=worksteal")  # a test takes minutes
    run_pytest(session, *shared, "--hypothesis-show-statistics", *drawn, hostile, threads=1, profile="nightly")


@nox.session(requires=["torch", "wheels"])
def benchmarks(session: nox.Session) -> None:
    """What fxopt costs and brings beside its peers, into docs/benchmarks; topics and --quick follow --."""
    install(session, ["test"], PACKAGES)
    install_models(session)
    install_pinned(session, *requirements("peers"))
    session.run("python", "-m", "benchmarks", *session.posargs, env=ENVIRONMENT | {"PYTHONPATH": "tests"})


@nox.session(requires=["torch", "wheels"])
def zoo(session: nox.Session) -> None:
    """Small models of all architectures of transformers and timm, into docs/zoo.md; hours. --quick: a few minutes."""
    install(session, [], PACKAGES)
    install_models(session)
    session.run("python", "-m", "zoo", *session.posargs, env=ENVIRONMENT | {"PYTHONPATH": "tests"})


@nox.session(requires=["torch", "wheels"])
def demo(session: nox.Session) -> None:
    """Install fxopt with real models and run its demonstration."""
    install(session, [], PACKAGES)
    install_models(session)
    session.run("python", "-m", "fxopt.demo", *session.posargs, env=ENVIRONMENT)


@nox.session(requires=["torch", "wheels"])
def readme(session: nox.Session) -> None:
    """Run the README in an environment that README's own install lines make, of wheels from here."""
    see(session, torch_directory(session))
    run_readme(session, "--find-links", str(wheel_directory(session)))


@nox.session(name="release-check", requires=["build"])
def release_check(session: nox.Session) -> None:
    """Install what `build` made into an empty environment, as a user would, and run the README there."""
    files = Path(session.create_tmp(), "files.txt").resolve()
    wheels = {path: Path(path).name.partition("-")[0] for path in glob("dist/*.whl")}
    # Whatever an index has under these names: the files that are to be released are installed.
    files.write_text("".join(f"{name} @ {Path(path).resolve().as_uri()}\n" for path, name in wheels.items()))
    install_pinned(session, "-c", str(files), "fxopt")
    session.run("fxopt", "--version")
    session.run("python", "-c", "import fxopt; assert fxopt.isa(), 'the kernels were not loaded'", env=ENVIRONMENT)
    run_readme(session, "-c", str(files))


@nox.session(requires=["torch"])
def types(session: nox.Session) -> None:
    """mypy --strict over packages, tests, typing cases, documented examples and this file."""
    install(session, ["types"], [])
    places = ["noxfile.py", "benchmarks", "zoo", "docs", "tests", *glob("packages/*/src"), *glob("packages/*/tests")]
    # One run of mypy takes one file of a name, and pytest fixes that of conftest.py: these are checked as copies.
    copies = Path(session.create_tmp(), "conftests").resolve()
    shutil.rmtree(copies, ignore_errors=True)
    copies.mkdir()
    for conftest in {"conftest.py", *glob("tests/conftest.py"), *glob("[!.]*/**/tests/conftest.py")}:
        shutil.copy(conftest, copies / f"{re.sub(r'[^a-z0-9]', '_', conftest.removesuffix('.py'))}.py")
    session.run("mypy", *session.posargs, *(place for place in places if holds_python(Path(place))), str(copies))


@nox.session(requires=["torch", "wheels"])
def sanitize(session: nox.Session) -> None:
    """The kernels' tests, and a minute of drawn numbers for each operator, with Address- and UBSanitizer."""
    packages = ["fxopt-capture", "fxopt-cpu", "fxopt-simplify"]
    install(session, ["test", "wheels"], [*packages, *siblings_for_tests("fxopt-cpu")])
    options = ("--no-deps", "--no-build-isolation", "--force-reinstall")
    setting = "--config-settings=cmake.define.FXOPT_SANITIZE=ON"
    session.run("python", "-m", "pip", "install", "-q", *options, setting, str(PACKAGES["fxopt-cpu"]))
    names = ("libasan.so", "libubsan.so", "libstdc++.so.6")
    found = [str(session.run("g++", f"-print-file-name={name}", silent=True, external=True)).strip() for name in names]
    # Python itself leaks, and what asks for more memory than a test needs is to be refused.
    asan = "detect_leaks=0:max_allocation_size_mb=1024:allocator_may_return_null=1"
    settings = {"LD_PRELOAD": ":".join(found), "ASAN_OPTIONS": asan, "FXOPT_FUZZ_SECONDS": "60"}
    run_pytest(session, str(PACKAGES["fxopt-cpu"] / "tests"), "tests/test_numbers.py", settings=settings)


@nox.session
def lint(session: nox.Session) -> None:
    """Ruff's rules and formatting, checked only: `ruff check --fix` and `ruff format` mend most."""
    install_pinned(session, *requirements("lint"))
    session.run("ruff", "check", *session.posargs)
    session.run("ruff", "format", "--check")


@nox.session(requires=["torch", "wheels"])
def docs(session: nox.Session) -> None:
    """Build the site into site/, with a page for each pass, every warning and broken link an error.

    The pictures of reports are taken anew where there is a Chromium.
    """
    install(session, ["docs", "reports"], PACKAGES)
    install_models(session)
    session.run("python", "docs/screenshots.py", env=ENVIRONMENT)
    shutil.rmtree(ROOT / "site", ignore_errors=True)
    options = ["--quiet", "--fail-on-warning", "--fresh-env", "--doctree-dir", str(Path(session.cache_dir, "doctrees"))]
    session.run("sphinx-build", *options, *session.posargs, "docs", "site", env=ENVIRONMENT)
    session.run("python", "docs/check_links.py", "site")


@nox.session(requires=["torch"])
def build(session: nox.Session) -> None:
    """Source distribution and wheel of each package (or those named after --) into dist/, as a release uploads them."""
    install_pinned(session, *requirements("build", "wheels"))
    see(session, torch_directory(session))
    shutil.rmtree(ROOT / "dist", ignore_errors=True)
    for name in session.posargs or PACKAGES:
        session.run("python", "-m", "build", "--no-isolation", "--outdir", "dist", str(PACKAGES[name]))
    for wheel in glob("dist/fxopt_cpu-*.whl"):
        if wheel.endswith("-any.whl"):
            session.error(f"{wheel} has no kernels: a release needs a C++ compiler")
        if "-linux_" in wheel:  # which no index takes; libtorch_cpu.so comes with torch
            session.run("auditwheel", "repair", "--exclude", "libtorch_cpu.so", "--wheel-dir", "dist", wheel)
            Path(wheel).unlink()
    session.run("twine", "check", "--strict", *glob("dist/*"))


@nox.session
def torch(session: nox.Session) -> None:
    """Install torch once, for the other sessions to share."""
    share_torch(session, torch_directory(session), "-c", PINS, "torch")


@nox.session(requires=["torch"])
def wheels(session: nox.Session) -> None:
    """Build the wheels that the other sessions install, once for all of them, and audit the library of kernels."""
    directory = wheel_directory(session)
    shutil.rmtree(directory, ignore_errors=True)
    sources = [str(path) for path in DISTRIBUTIONS.values()]
    install_pinned(session, *requirements("wheels", "audit"))
    see(session, torch_directory(session))
    # With the backend here, no environment has to be made for each of them.
    options = ("-q", "--no-deps", "--no-build-isolation", "--wheel-dir", str(directory))
    session.run("python", "-m", "pip", "wheel", *options, *sources)
    with ZipFile(wheel_of(session, "fxopt-cpu")) as wheel:
        if sys.version_info < (3, 11):
            session.warn("torch-abi-audit asks for Python 3.11: the library of kernels was not audited")
        elif KERNELS in wheel.namelist():
            # Other versions of torch than the one that it was built with have to load it.
            session.run("torch-abi-audit", "--check", "torch", wheel.extract(KERNELS, session.create_tmp()))
        else:
            session.warn("there is no C++ compiler: the kernels were left out")


@nox.session(requires=["torch"])
def tools(session: nox.Session) -> None:
    """Install pytest, pytest-xdist and Hypothesis once, for the sessions `alone` to share."""
    shutil.rmtree(tools_directory(session), ignore_errors=True)
    install_pinned(session, "-q", "--target", str(tools_directory(session)), *requirements("test", "processes"))


def isolate(session: nox.Session, name: str, *, whole: bool) -> None:
    """Install one package with only what it declares, and try it there, with the whole of its tests or without."""
    names = [name, *(siblings_for_tests(name) if whole else [])]
    install(session, ["test", "processes"], names, tools_directory(session))
    session.run("python", "tests/isolation.py", *names, env=ENVIRONMENT)
    if whole and any(DISTRIBUTIONS[name].glob("tests/**/test_*.py")):
        run_pytest(session, *IN_PROCESSES, str(DISTRIBUTIONS[name] / "tests"), threads=1, settings=SHALLOW)


def share_torch(session: nox.Session, directory: Path, *requirement: str) -> None:
    """Install torch into a directory, unless it is there."""
    if directory.exists():
        session.log(f"torch is there already: {directory}")
        return
    unfinished = directory.with_name(f"{directory.name}.unfinished")
    shutil.rmtree(unfinished, ignore_errors=True)
    session.install("-q", "--no-compile", "--target", str(unfinished), *requirement)
    unfinished.rename(directory)


def install(session: nox.Session, groups: Iterable[str], names: Iterable[str], *shared: Path) -> None:
    """Install dependency groups and packages, with the siblings these declare, beside torch and what else is shared."""
    purelib = see(session, torch_directory(session), *shared)
    files = [str(wheel_of(session, name)) for name in with_siblings(names)]
    used_again = any(purelib.glob("fxopt*.dist-info"))
    install_pinned(session, *requirements(*groups), *files)
    if used_again and files:  # pip keeps an installed package of the same version
        session.install("--no-deps", "--force-reinstall", *files)


def install_pinned(session: nox.Session, *what: str) -> None:
    """Install in the versions that were tried together.

    What is imported is compiled then: of most packages that is a small part, and pip would compile all of it.
    """
    if not Path(PINS).exists():
        session.error(
            f"no versions are pinned for this Python, only for {', '.join(PYTHONS)}: run nox with one of these"
        )
    session.install("--no-compile", "-c", PINS, *what)


def see(session: nox.Session, *directories: Path) -> Path:
    """Let the session's environment import what lies in these directories; return where its own packages lie."""
    script = "import sysconfig; print(sysconfig.get_path('purelib'))"
    purelib = Path(str(session.run("python", "-c", script, silent=True)).strip())
    (purelib / "shared.pth").write_text("".join(f"{path}\n" for path in directories), encoding="utf-8")
    return purelib


def run_readme(session: nox.Session, *options: str) -> None:
    """Run README's install lines, with these options of pip, and then its examples."""
    block = (ROOT / "README.md").read_text(encoding="utf-8").split("```bash\n")[1].split("```")[0]
    for line in block.splitlines():
        install_pinned(session, *options, *shlex.split(line)[2:])
    session.run("python", "tests/run_blocks.py", "README.md", env=ENVIRONMENT)


def install_models(session: nox.Session) -> None:
    """Install the packages that real models come from."""
    install_pinned(session, *requirements("models", "onwards"))
    # They also ask for torch, or for a torchvision whose build has to match it.
    install_pinned(session, "--no-deps", *requirements("models-without-dependencies"))


def requirements(*groups: str) -> list[str]:
    """What the groups of pyproject.toml ask for."""
    return list(nox.project.dependency_groups(PYPROJECT, *groups))


def with_siblings(names: Iterable[str]) -> list[str]:
    """The packages and all of this repository that they need, following declared dependencies."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        name = waiting.pop()
        if name in DISTRIBUTIONS and name not in found:
            found.add(name)
            project = nox.project.load_toml(DISTRIBUTIONS[name] / "pyproject.toml")["project"]
            waiting += map(name_of, project.get("dependencies", []))
    return sorted(found)


def siblings_for_tests(name: str) -> list[str]:
    """The packages of this repository that a distribution's own group `test` names, beside what it needs to run."""
    project = nox.project.load_toml(DISTRIBUTIONS[name] / "pyproject.toml")
    group = nox.project.dependency_groups(project, "test") if "test" in project.get("dependency-groups", {}) else ()
    return [each for each in map(name_of, group) if each in DISTRIBUTIONS]


def name_of(requirement: str) -> str:
    """The distribution that a requirement asks for."""
    return re.split(r"[^\w-]", requirement)[0]


def run_pytest(
    session: nox.Session,
    *arguments: str,
    profile: str = "ci",
    threads: int | None = None,
    settings: Mapping[str, str] = MappingProxyType({}),
) -> None:
    """Run pytest over what is installed, with one of Hypothesis's profiles and these settings of the environment."""
    environment = ENVIRONMENT | {"FXOPT_WHEELS": str(wheel_directory(session)), **settings}
    if threads is not None:
        environment["OMP_NUM_THREADS"] = str(threads)
    # A selection after `--` may leave a package with nothing to run, which is status 5.
    codes = [0, 5] if session.posargs else [0]
    # With "ci", Hypothesis draws the same examples each time and sets no deadline; a plain `pytest` looks for new ones.
    options = ["-c", "pyproject.toml", f"--rootdir={ROOT}", f"--hypothesis-profile={profile}"]
    session.run("python", "-m", "pytest", *options, *arguments, *session.posargs, env=environment, success_codes=codes)


def glob(pattern: str) -> list[str]:
    """The paths in the repository that match, relative to its root, which is where sessions run."""
    return sorted(str(path.relative_to(ROOT)) for path in ROOT.glob(pattern))


def files_of_tests(*names: str) -> list[str]:
    """The files of these tests of the whole, whichever folder they are in."""
    return [path for name in names for path in glob(f"tests/**/test_{name}.py")]


def holds_python(place: Path) -> bool:
    """Whether a place is something for mypy, which takes a folder without Python files for a mistake."""
    return place.is_file() or any(path.name != "conftest.py" for path in place.rglob("*.py"))


def torch_directory(session: nox.Session, version: str = "") -> Path:
    """Where torch is shared from: another Python, another version or other pins are another directory."""
    key = version or hashlib.sha256(Path(PINS).read_bytes()).hexdigest()[:8]
    return shared_directory(session, f"torch-{sys.version_info.major}.{sys.version_info.minor}-{key}")


def tools_directory(session: nox.Session) -> Path:
    """Where the tools of tests are shared from."""
    return shared_directory(session, f"tools-{sys.version_info.major}.{sys.version_info.minor}")


def shared_directory(session: nox.Session, name: str) -> Path:
    """Where packages are shared from: Hypothesis reads the source of every module that is not in site-packages."""
    return Path(session.cache_dir, name, "site-packages").resolve()


def wheel_directory(session: nox.Session) -> Path:
    """Where the wheels of this run lie."""
    return Path(session.cache_dir, "wheels").resolve()


def wheel_of(session: nox.Session, name: str) -> Path:
    """The wheel of a package."""
    return next(wheel_directory(session).glob(f"{name.replace('-', '_')}-[0-9]*.whl"))
