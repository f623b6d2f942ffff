"""The reference of each package: a page that lists what it exports, and one for each group that belongs together.

Together belongs what one module defines. Names are documented as users import them, from the top of the package.
"""

from __future__ import annotations

import ast
import importlib
import importlib.metadata
import inspect
import shutil
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import takewhile
from pathlib import Path
from types import ModuleType

from site_pages.operations import operations_page


@dataclass(frozen=True)
class Group:
    """Names of a package that one module defines.

    Attributes:
        module: its full name.
        names: what the package exports of it, sorted.
    """

    module: str
    names: tuple[str, ...]

    @property
    def page(self) -> str:
        """The name of its page."""
        return self.module.rpartition(".")[2].strip("_") or "package"

    @property
    def summary(self) -> str:
        """The first line of the module's docstring."""
        return (importlib.import_module(self.module).__doc__ or "").strip().partition("\n")[0]


def installed_packages() -> list[str]:
    """Return the import names of fxopt and of what is installed with a name like it."""
    names = {str(each.metadata["Name"]) for each in importlib.metadata.distributions()}
    return sorted(name.replace("-", "_") for name in names if name == "fxopt" or name.startswith("fxopt-"))


def write_references(folder: Path, packages: Iterable[str] | None = None) -> None:
    """Write the reference into a folder that is emptied first.

    Args:
        folder: where to write.
        packages: import names; if None, those that are installed.
    """
    chosen = installed_packages() if packages is None else list(packages)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for name in chosen:
        package = importlib.import_module(name)
        groups = groups_of(package)
        (folder / f"{name}.md").write_text(_package_page(package, groups), encoding="utf-8")
        (folder / name).mkdir()
        for group in groups:
            (folder / name / f"{group.page}.md").write_text(_group_page(package, group), encoding="utf-8")
    (folder / "operations.md").write_text(operations_page(), encoding="utf-8")
    (folder / "index.md").write_text(_index(chosen), encoding="utf-8")


def groups_of(package: ModuleType) -> list[Group]:
    """Return what a package exports of its own, by the module that defines it; names of other packages are not there.

    >>> import fxopt_arith
    >>> groups_of(fxopt_arith)
    [Group(module='fxopt_arith.true_division', names=('ChangeTrueDivToMulByInverse',))]
    """
    data = _data_of(package)
    found: defaultdict[str, set[str]] = defaultdict(set)
    for name in getattr(package, "__all__", ()):
        module = _home(getattr(package, name), name, data) or package.__name__
        if f"{module}.".startswith(f"{package.__name__}."):
            found[module].add(name)
    return [Group(module, tuple(sorted(found[module]))) for module in sorted(found)]


def _home(value: object, name: str, data: Mapping[str, tuple[str, str]]) -> str:
    """Return the module that defines a value; "" where that is not known."""
    if name in data and not inspect.isclass(value) and not inspect.isroutine(value):
        return data[name][0]
    return str(getattr(value, "__module__", "") or "")


@cache
def _data_of(package: ModuleType) -> dict[str, tuple[str, str]]:
    """Return for each name that a module of a package assigns, with `#:` above it: the module, and the text."""
    found: dict[str, tuple[str, str]] = {}
    root = Path(str(package.__file__)).parent
    for path in sorted(root.rglob("*.py")):
        parts = [package.__name__, *path.relative_to(root).with_suffix("").parts]
        module = ".".join(part for part in parts if part != "__init__")
        source = path.read_text(encoding="utf-8")
        lines = source.splitlines()
        for statement in ast.parse(source).body:
            name, text = _assigned(statement), _text(lines[: statement.lineno - 1])
            if name and text:
                found.setdefault(name, (module, text))
    return found


def _assigned(statement: ast.stmt) -> str:
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return targets[0].id if len(targets) == 1 and isinstance(targets[0], ast.Name) else ""


def _text(lines: Sequence[str]) -> str:
    """Return the comment at the end of some lines of source code, if it is of `#:`."""
    last = list(takewhile(lambda line: line.startswith("#:"), reversed(lines)))
    return "\n".join(line.removeprefix("#:").strip() for line in reversed(last))


def _index(packages: Iterable[str]) -> str:
    rows = [f"| [{name.replace('_', '-')}]({name}.md) | {_first_line(sys.modules[name])} |" for name in packages]
    parts = [
        "# Packages",
        "What each package exports, from its docstrings. Modules below a package are its own: import from the top. "
        "[Operations](operations.md) lists the names that readers of graphs return.",
        "\n".join(["| package | holds |", "|---|---|", *rows]),
        "\n".join(["```{toctree}", ":hidden:", "", *packages, "operations", "```"]),
    ]
    return "\n\n".join(parts) + "\n"


def _first_line(module: ModuleType) -> str:
    return (module.__doc__ or "").strip().partition("\n")[0].replace("|", "\\|")


def _package_page(package: ModuleType, groups: Iterable[Group]) -> str:
    name = package.__name__
    rows = [f"| {_links(name, group)} | {group.summary.replace('|', chr(92) + '|')} |" for group in groups]
    parts = [
        f"# {name.replace('_', '-')}",
        f"```{{eval-rst}}\n.. automodule:: {name}\n   :no-members:\n```",
        "\n".join(["| names | about |", "|---|---|", *rows]),
        "\n".join(["```{toctree}", ":hidden:", "", *(f"{name}/{group.page}" for group in groups), "```"]),
    ]
    if name == "fxopt":
        parts.insert(2, "Beside these, `fxopt` has all names of the other packages.")
    return "\n\n".join(parts) + "\n"


def _links(package: str, group: Group) -> str:
    return ", ".join(f"[`{name}`]({package}/{group.page}.md)" for name in group.names)


def _group_page(package: ModuleType, group: Group) -> str:
    shown = group.names[:3]
    title = ", ".join(shown) + (f" and {len(group.names) - 3} more" if len(group.names) > 3 else "")
    said = {inspect.cleandoc(getattr(package, name).__doc__ or "").partition("\n")[0] for name in group.names}
    parts = [f"# {title}", "" if group.summary in said else group.summary]
    parts += [f"```{{eval-rst}}\n{directive}\n```" for directive in _directives(package, group)]
    return "\n\n".join(part for part in parts if part) + "\n"


def _directives(package: ModuleType, group: Group) -> Iterator[str]:
    data = _data_of(package)
    for name in group.names:
        value, path = getattr(package, name), f"{package.__name__}.{name}"
        if inspect.isclass(value):
            # What a public class has from one that is not public belongs to it.
            inherits = getattr(value.__base__, "__module__", "") == "fxopt_core.passes.base"
            yield f".. autoclass:: {path}" + "\n   :inherited-members:" * inherits
        elif inspect.isroutine(value):
            yield f".. autofunction:: {path}"
        else:
            text = data[name][1] if name in data else ""
            lines = [f"   {line}".rstrip() for line in text.splitlines()]
            yield "\n".join([f".. py:data:: {path}", "", *lines])
