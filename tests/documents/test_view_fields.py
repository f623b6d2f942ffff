"""docs/writing-passes.md names every field of what readers return, and nothing else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import fxopt_rewrite

PAGE = (Path(__file__).parents[2] / "docs" / "writing-passes.md").read_text(encoding="utf-8")
ROWS = dict(re.findall(r"^\| (?:`(\w+)`|of any layer) \| (`[a-z].*) \|$", PAGE, re.M))
VIEWS = [
    view
    for view in vars(fxopt_rewrite).values()
    if isinstance(view, type) and view.__module__ == "fxopt_rewrite.calls.records" and view.__name__ != "Obstacle"
]


@pytest.mark.parametrize("view", VIEWS, ids=lambda view: view.__name__)
def test_every_field_is_named(view: type) -> None:
    layer = fxopt_rewrite.ParameterisedCall
    general = {name for name in dir(layer) if not name.startswith("_")}
    public = {name for name in dir(view) if not name.startswith("_")}
    row = ROWS["" if view is layer else view.__name__]
    told = set(re.findall(r"`(\w+)(?:`|\()", row)) - set(vars(fxopt_rewrite)) - {"get_attr"}
    assert told == (public - general if issubclass(view, layer) and view is not layer else public)


def test_all_views_are_public() -> None:
    assert {view.__name__ for view in VIEWS} | {""} == {*ROWS} | {"ParameterisedCall"}
    assert all(view.__name__ in fxopt_rewrite.__all__ for view in VIEWS)
