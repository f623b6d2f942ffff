"""The reference is made from what is installed, the page on architecture shows what is there, and links are checked."""

from __future__ import annotations

import doctest
import importlib
import re
from pathlib import Path

import pytest
from test_floors import FLOORS

from fxopt_rewrite.ops.vocabulary import MODULES, SYNONYMS
from site_pages.operations import operations_page
from site_pages.references import groups_of, installed_packages

ROOT = Path(__file__).parents[2]
PACKAGES = sorted(path.parent.name.replace("-", "_") for path in ROOT.glob("packages/*/src"))
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


def test_all_packages_are_there() -> None:
    assert set(PACKAGES) <= set(installed_packages())


@pytest.mark.parametrize("name", [name for name in PACKAGES if name != "fxopt"])
def test_all_that_a_package_exports_is_in_the_reference_once(name: str) -> None:
    package = importlib.import_module(name)
    groups = groups_of(package)
    documented = [each for group in groups for each in group.names]
    modules = {each: str(getattr(getattr(package, each), "__module__", name)) for each in package.__all__}
    homes = {each: module.partition(".")[0] for each, module in modules.items()}
    own = [each for each, home in homes.items() if home == name or home not in PACKAGES]
    assert sorted(documented) == sorted(own)  # what is another package's is in the reference of that one
    assert len({group.page for group in groups}) == len(groups)
    assert all(group.summary for group in groups)


def test_the_umbrella_documents_its_own_names_alone() -> None:
    documented = {each for group in groups_of(importlib.import_module("fxopt")) for each in group.names}
    assert {"optimize"} <= documented
    assert not {"MergeLinears", "verify", "registry"} & documented


def test_operations_are_listed_by_the_names_that_readers_return() -> None:
    page = operations_page()
    rows = dict(re.findall(r"^\| `(\w+)` \| `(.*?)` \|", page, re.MULTILINE))
    assert rows["conv2d"] == "input, weight, bias=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1"
    assert {*MODULES.values(), *SYNONYMS.values(), "view", "scaled_dot_product_attention"} <= rows.keys()
    assert not SYNONYMS.keys() & rows.keys()
    assert "| `div` | `input, other, rounding_mode=None` | `operator.truediv`, `divide`, `true_divide` |" in page


def test_the_table_of_floors_is_the_one_that_is_checked() -> None:
    shown = {}
    for row in re.findall(r"^\| `(_?fxopt\w*(?:\.\w+)*)` \|.*\|(.*)\|$", ARCHITECTURE, re.MULTILINE):
        distribution = row[0].partition(".")[0]
        below = re.findall(r"`(.+?)`", row[1])
        shown[row[0]] = {f"{distribution}{each}" if each.startswith(".") else each for each in below}
    assert shown == {unit: {*below} for unit, below in FLOORS.items()}


def test_the_picture_of_floors_has_every_unit() -> None:
    picture = (ROOT / "docs" / "_static" / "floors.svg").read_text(encoding="utf-8")
    words = {*re.findall(r"[\w-]+", " ".join(re.findall(r"<text[^>]*>(.*?)</text>", picture)))}
    assert words >= {re.sub("^fxopt_", "fxopt-", unit.rpartition(".")[2]) for unit in FLOORS}


def test_the_files_that_the_page_on_architecture_names_are_there() -> None:
    named = {*re.findall(r"`(\w+/[\w/]*(?:\.py)?)`", ARCHITECTURE)}
    assert len(named) > 50
    missing = [name for name in named if not any(ROOT.glob(f"packages/*/src/{name}")) and not (ROOT / name).exists()]
    assert not sorted(missing)


@pytest.mark.parametrize("name", ["public_names", "references"])
def test_examples_in_docstrings(name: str) -> None:
    found = doctest.testmod(importlib.import_module(f"site_pages.{name}"))
    assert found.attempted
    assert not found.failed
