"""The registry knows which plugins are part of fxopt: exactly those that the packages of this repository declare."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fxopt_core import registry
from fxopt_core.registry.shipped import SHIPPED

ROOT = Path(__file__).parents[1]
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
