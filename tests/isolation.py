"""Check that a package works with only what it declares: `python tests/isolation.py fxopt-core`.

Further names are packages that its tests need.

Run by the session `alone` inside that package's environment. Expected there are the package, pytest, pytest-xdist,
hypothesis and all that these and torch require: whatever else can be imported is an error. Then every module of the
package is imported, and the examples in the docstrings of its passes run.
"""

from __future__ import annotations

import doctest
import sys
import sysconfig
import warnings
from importlib import import_module
from importlib.machinery import SourceFileLoader
from importlib.metadata import distribution, distributions
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules, walk_packages

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

TEST_TOOLS = ("pytest", "pytest-xdist", "hypothesis")
INSTALLER = "pip"  # every virtual environment has it, and no package imports it


def required_by(*names: str) -> set[str]:
    """The distributions that installing `names`, without extras, brings."""
    found: set[str] = set()
    waiting = [Requirement(name) for name in names]
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        if name not in found or requirement.extras:
            found.add(name)
            waiting += [each for each in needs_of(name) if applies(each, requirement.extras)]
    return found


def needs_of(name: str) -> list[Requirement]:
    """The requirements that an installed distribution states."""
    return [Requirement(text) for text in distribution(name).requires or ()]


def applies(requirement: Requirement, extras: set[str]) -> bool:
    """Whether a requirement holds on this machine when these extras are asked for."""
    marker = requirement.marker
    return marker is None or any(marker.evaluate({"extra": extra}) for extra in {"", *extras})


def installed() -> dict[str, set[Path]]:
    """The distributions of this environment and the files of each."""
    found: dict[str, set[Path]] = {}
    for each in distributions():
        files = {Path(str(file.locate())).resolve() for file in each.files or ()}
        found.setdefault(canonicalize_name(each.metadata["Name"]), set()).update(files)
    return found


def stray_modules(files: set[Path]) -> list[str]:
    """The importable top-level modules that belong neither to Python nor to one of the files."""
    owned = files | {file.parent for file in files}
    python = {Path(sysconfig.get_path(key)).resolve() for key in ("stdlib", "platstdlib")}
    python |= {path / "lib-dynload" for path in python}
    entries = [Path(entry).resolve() for entry in sys.path[1:]]  # the first is the directory of this script
    return [
        module.name
        for entry in entries
        if entry not in python
        for module in iter_modules([str(entry)])
        if not owned & {entry / module.name, entry / f"{module.name}.py"}
    ]


def tried(name: str) -> int:
    """Import every module of a package, and run the examples of its passes; return how many lines the examples have."""
    package = import_module(name.replace("-", "_"))
    for module in walk_packages(package.__path__, f"{package.__name__}."):
        spec = find_spec(module.name)
        if not module.name.endswith("__main__") and spec is not None and isinstance(spec.loader, SourceFileLoader):
            import_module(module.name)  # a library of operators is none of Python's
    from fxopt_core import registry  # after the check of what is installed

    runner = doctest.DocTestRunner()
    for known in registry().available().values():
        if known.distribution == name:
            scope = vars(sys.modules[known.transformation.__module__])
            for example in doctest.DocTestFinder(recurse=False).find(known.transformation, globs=dict(scope)):
                runner.run(example)
    tries, failures = runner.tries, runner.failures
    if failures or registry().failed:
        sys.exit(f"{name}: {failures} of {tries} lines of examples fail; plugins that do not load: {registry().failed}")
    return tries


def main() -> None:
    """Fail, with the names, where the environment offers more than was declared."""
    name, *for_tests = sys.argv[1:]
    declared = required_by(name, "torch", *for_tests, *TEST_TOOLS)
    environment = installed()
    surplus = sorted(environment.keys() - declared - {INSTALLER})
    if surplus:
        sys.exit(f"{name} does not declare what is installed beside it: {', '.join(surplus)}")
    stray = stray_modules(set().union(*environment.values()))
    if stray:
        sys.exit(f"{name} can import modules of no declared distribution: {', '.join(stray)}")
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")  # torch's, once, where there is no NumPy
    examples = tried(name)
    print(
        f"{name} sees what it declares and nothing else: {', '.join(sorted(declared))}; all its modules can be "
        f"imported, and {examples} examples of its passes run"
    )


if __name__ == "__main__":
    main()
