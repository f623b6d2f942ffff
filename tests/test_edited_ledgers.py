"""A ledger whose text was edited by hand: it is refused, undo is refused and changes nothing, or undo works."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest
import torch
from graph_picture import difference, picture
from hypothesis import event, given, strategies as st
from nightly import drawn
from test_travel_ways import FORMS, PASSES, X
from torch.fx import GraphModule

from fxopt_core import FxoptError, compose, history, ledger_of, undo
from fxopt_rewrite import (
    ledger_from_json,
    ledger_to_json,
)

Path = tuple[Any, ...]


@cache
def prepared(form: int) -> tuple[GraphModule, str, list[Path]]:
    """Return a rewritten graph module, the text of its ledger, and the paths to all that is in there."""
    graph_module = compose(*PASSES)(FORMS[form]())
    text = ledger_to_json(ledger_of(graph_module))
    return graph_module, text, [path for path in paths(json.loads(text)) if path]


def paths(value: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path to a value and to all values in it."""
    yield path
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, entry in entries:
        yield from paths(entry, (*path, key))


def at(value: Any, path: Path) -> Any:
    """Return what is there."""
    for key in path:
        value = value[key]
    return value


def edit(data: Any, path: Path, how: str, other: Path) -> None:
    """Edit one value."""
    owner, key = at(data, path[:-1]), path[-1]
    value = owner[key]
    if how == "delete":
        del owner[key]
    elif how == "number":
        owner[key] = value + 1 if type(value) is int else 7
    elif how == "text":
        owner[key] = f"{value}x" if isinstance(value, str) else "x"
    elif how == "copy":
        owner[key] = copy.deepcopy(at(data, other))
    else:
        owner[key] = {"null": None, "list": [value], "flag": True}[how]


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own copy of an export graph
@pytest.mark.parametrize("form", range(len(FORMS)))
@drawn(100)
@given(data=st.data())
def test_an_edit_anywhere(form: int, data: st.DataObject) -> None:
    original, text, places = prepared(form)
    edited, pick = json.loads(text), st.sampled_from(places)
    how = data.draw(st.sampled_from(["delete", "number", "text", "copy", "null", "list", "flag"]))
    edit(edited, data.draw(pick), how, data.draw(pick))
    try:
        ledger = ledger_from_json(json.dumps(edited))
    except FxoptError:
        event("the text is refused")
        return
    graph_module = copy.deepcopy(original)
    graph_module.meta["fxopt"] = ledger
    before = picture(graph_module)
    try:
        history(graph_module).to_json()
        undo(graph_module)
    except FxoptError as error:
        event("undo is refused")
        assert "othing was changed" in str(error) or "rolled back" in str(error)
        assert difference(picture(graph_module), before) == []
        torch.testing.assert_close(graph_module(X), original(X), rtol=0, atol=0)
        return
    event("undone")
