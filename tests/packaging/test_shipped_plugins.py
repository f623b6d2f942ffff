"""The registry knows which plugins are part of fxopt: exactly those that the packages of this repository declare."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

from fxopt_core import SHIPPED, Transformation, registry

ROOT = Path(__file__).parents[2]
DECLARED = re.compile(r'^\[project\.entry-points\.fxopt\]\n(\S+) = "(\S+)"', re.MULTILINE)
FOUND = {
    path.parent.name: match.groups()
    for path in sorted(ROOT.glob("packages/*/pyproject.toml"))
    if (match := DECLARED.search(path.read_text(encoding="utf-8")))
}


@pytest.mark.parametrize("dist", FOUND)
def test_each_plugin_of_ours_is_on_the_list(dist: str) -> None:
    """Else a stranger could take its names away."""
    package = dist.replace("-", "_")
    assert dist in SHIPPED
    module = "_fxopt_entry_points" if package == "fxopt" else package
    assert FOUND[dist] == (package.removeprefix("fxopt_"), f"{module}.plugin")


def test_they_are_recognised_as_they_are_installed() -> None:
    """The passes of all plugins here come from shipped ones, and nothing else failed."""
    shipped = {source.distribution: source.shipped for source in registry()._contents().offers}
    assert {dist: shipped.get(dist) for dist in FOUND} == dict.fromkeys(FOUND, True)


@pytest.mark.parametrize("family", ["arith", "cpu", "linear", "norm", "simplify"])
def test_a_family_offers_all_its_passes_as_the_registry_knows_them(family: str) -> None:
    """With a summary that is an equation; each is made by its name."""
    package, plugin = importlib.import_module(f"fxopt_{family}"), importlib.import_module(f"fxopt_{family}.plugin")
    exported = [getattr(package, name) for name in package.__all__]
    passes = {cls for cls in exported if isinstance(cls, type) and issubclass(cls, Transformation)}
    assert set(plugin.fxopt_transformations()) == passes
    for cls in passes:
        info = registry().available()[cls().name]
        assert (info.distribution, info.version) == (f"fxopt-{family}", package.__version__)
        assert "->" in info.summary and info.preserves_computation
        assert info.reversible == (family != "norm" and info.name != "fold-weights")
        assert registry().create(info.name) == cls()
