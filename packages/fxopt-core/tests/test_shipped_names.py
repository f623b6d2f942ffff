"""What is part of fxopt keeps its names, whatever else is installed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from fxopt_core import DeepCopy, Registry
from fxopt_core.errors import DuplicatePassError, PluginLoadError, UnknownPassError

PLUGIN = '''
from fxopt_core import Transformation, hookimpl

class {first}(Transformation):
    """A stranger's."""
    def transform(self, graph_module):
        return graph_module

class ItsOwn({first}):
    """A stranger's other one."""

@hookimpl
def fxopt_transformations():
    return [{first}, ItsOwn]

@hookimpl
def fxopt_pipelines():
    return {{"{pipeline}": "its-own"}}
'''

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Return a function that installs a distribution with a plugin, as pip would leave it."""
    monkeypatch.delenv("FXOPT_PLUGINS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(
        dist: str,
        entry: str,
        module: str,
        *,
        folder: str | None = None,
        first: str = "Harmless",
        pipeline: str = "harmless-pipeline",
    ) -> None:
        information = tmp_path / f"{(folder or dist).replace('-', '_')}-9.9.dist-info"
        information.mkdir()
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {dist}\nVersion: 9.9\n")
        (information / "entry_points.txt").write_text(f"[fxopt]\n{entry} = {module}\n")
        if not module.startswith("fxopt_"):
            monkeypatch.delitem(sys.modules, module, raising=False)
            (tmp_path / f"{module}.py").write_text(PLUGIN.format(first=first, pipeline=pipeline))

    return install


def families(registry: Registry) -> dict[str, str]:
    """Return the distribution of each of core's passes."""
    passes = registry.available()
    return {name: passes[name].distribution for name in ("deep-copy", "lint-and-recompile")}


CORES = {"deep-copy": "fxopt-core", "lint-and-recompile": "fxopt-core"}


def test_an_entry_point_named_as_a_shipped_family_takes_nothing(install: Install) -> None:
    """The family works, the stranger's plugin is not even imported, and `failed` says whose it is."""
    install("evil", "core", "evil_plugin")
    known = Registry()
    assert families(known) == CORES
    assert known.create("deep-copy") == DeepCopy()
    assert known.pipeline("deep-copy,lint-and-recompile").name
    error = known.failed["core"]
    assert type(error) is PluginLoadError
    assert isinstance(error.__cause__, DuplicatePassError)
    for part in ("'core' (of fxopt-core ", "'core' (of evil 9.9)", "stays with the part of fxopt"):
        assert part in str(error)
    assert "evil_plugin" not in sys.modules
    with pytest.raises(UnknownPassError):
        known.create("its-own")


def test_a_pass_named_as_a_shipped_one_takes_nothing(install: Install) -> None:
    """The stranger keeps what is its own."""
    install("evil", "evil", "evil_plugin", first="DeepCopy")
    known = Registry()
    assert families(known) == CORES
    assert known.create("deep-copy") == DeepCopy()
    assert known.available()["its-own"].distribution == "evil"
    assert known.pipelines()["harmless-pipeline"] == "its-own"
    assert list(known.failed) == ["evil"]
    assert "'deep-copy' is claimed as a pass by plugin 'core' (of fxopt-core" in str(known.failed["evil"])
    assert "stays with the part of fxopt" in str(known.failed["evil"])


@pytest.mark.parametrize(
    ("dist", "folder", "module"),
    [
        ("fxopt-core", "evil", "evil_plugin"),  # metadata may say any name
        ("fxopt-core-extras", None, "evil_plugin"),
        ("fxopt.core", "evil", "evil_plugin"),
        ("evil", None, "fxopt_core.plugin"),  # and entry points any module
        ("fxopt-linear", None, "fxopt_core.plugin"),
    ],
)
def test_nobody_is_a_part_of_fxopt_by_writing_so(install: Install, dist: str, folder: str | None, module: str) -> None:
    """Distribution, entry point and module have to be the three that belong together."""
    install(dist, "core", module, folder=folder)
    known = Registry()
    assert families(known) == CORES
    assert f"'core' (of {dist} 9.9)" in str(known.failed["core"])


def test_the_allow_list_still_decides(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who leaves core out gives its names to others."""
    install("evil", "evil", "evil_plugin", first="DeepCopy")
    monkeypatch.setenv("FXOPT_PLUGINS", "evil")
    known = Registry()
    assert known.available()["deep-copy"].distribution == "evil"
    assert known.failed == {}
    monkeypatch.setenv("FXOPT_PLUGINS", "core")
    assert Registry().failed == {}
