"""Kinds of edits that passes bring."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

import pytest
import torch
from site_passes import Call
from torch import nn
from torch.fx import GraphModule

from fxopt_core import FxoptError, Refusal, UndoError, history, ledger_of, undo
from fxopt_rewrite import (
    CustomEdit,
    Editor,
    GraphIndex,
    ReversibleSitePass,
    ledger_from_json,
    ledger_to_json,
    stored,
)
from fxopt_rewrite.data import codec
from fxopt_rewrite.journal import edits
from fxopt_rewrite.journal.journal import Edits
from fxopt_rewrite.journal.replay import Live

T = TypeVar("T")


@stored
@dataclass(frozen=True, slots=True)
class SetNote(CustomEdit):
    """A note was put into ``graph_module.meta``."""

    key: str
    former: str | None

    @property
    def concerns(self) -> tuple[str, ...]:
        """The note."""
        return (f"meta {self.key}",)

    def take_back(self, graph_module: GraphModule) -> None:
        """Put the former note back."""
        if self.former is None:
            del graph_module.meta[self.key]
        else:
            graph_module.meta[self.key] = self.former


@dataclass(frozen=True)
class Keyed(CustomEdit, Generic[T]):
    """A kind that says what its key is."""

    key: T

    def take_back(self, graph_module: GraphModule) -> None:
        """Do nothing."""


def test_kinds_may_be_generic() -> None:
    assert Keyed[int](3).visit == "custom"


@dataclass(frozen=True, slots=True)
class NotStored(CustomEdit):
    """A kind that no ledger can hold."""

    def take_back(self, graph_module: GraphModule) -> None:
        """Do nothing."""


class NoteCalls(ReversibleSitePass[Call]):
    """relu(x) -> clamp(x, 0), and a note that says so."""

    def __init__(self, *, text: str = "done", kind: str = "custom") -> None:
        self.text, self.kind = text, kind

    def match(self, index: GraphIndex) -> Iterator[Call]:
        yield from (Call(node) for node in index.nodes if node.target is torch.relu)

    def check(self, site: Call, index: GraphIndex) -> Refusal | None:
        return None

    def rewrite(self, site: Call, edit: Editor) -> None:
        call = edit.call_function(torch.clamp, *site.node.args, 0.0, before=site.node, like=[site.node])
        edit.replace(site.node, call)
        meta = edit.graph_module.meta
        former, meta["note"] = meta.get("note"), self.text
        edit.record(SetNote("note", former) if self.kind == "custom" else NotStored())


class Model(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(x) + 1


def noted(**options: str) -> GraphModule:
    graph_module = torch.fx.symbolic_trace(Model())
    graph_module.meta["note"] = "before"
    return NoteCalls(**options)(graph_module)


def names(graph_module: GraphModule) -> list[str]:
    return [node.name for node in graph_module.graph.nodes]


@pytest.mark.parametrize("way", ["as it is", "pickle", "copy", "ledger"])
def test_an_edit_of_a_passs_own_is_taken_back(way: str) -> None:
    graph_module = noted()
    assert graph_module.meta["note"] == "done"
    if way == "pickle":
        graph_module = pickle.loads(pickle.dumps(graph_module))
    elif way == "copy":
        graph_module = copy.deepcopy(graph_module)
    elif way == "ledger":
        assert ledger_from_json(ledger_to_json(ledger_of(graph_module))) == ledger_of(graph_module)
    undo(graph_module)
    assert names(graph_module) == ["x", "relu", "add", "output"]
    assert graph_module.meta["note"] == "before"


def test_an_error_of_taking_back_is_a_refusal() -> None:
    graph_module = NoteCalls()(torch.fx.symbolic_trace(Model()))
    del graph_module.meta["note"]
    before = names(graph_module)
    with pytest.raises(UndoError, match=r"cannot undo `note-calls`: SetNote cannot be taken back \(KeyError: 'note'\)"):
        undo(graph_module)
    assert names(graph_module) == before
    assert history(graph_module)[-1].state == "applied"


def test_edits_of_the_same_are_undone_in_order() -> None:
    first, second, other = Edits((SetNote("a", None),)), Edits((SetNote("a", "x"),)), Edits((SetNote("b", None),))
    assert first.dependent([other, second]) is second
    assert first.dependent([other]) is None
    assert first.shapes_after({"weight": (2,)}) == {"weight": (2,)}


def test_a_kind_that_no_ledger_can_hold_is_refused_at_once() -> None:
    with pytest.raises(FxoptError, match="note-calls") as caught:
        noted(kind="not stored")
    assert "expected a frozen dataclass decorated with fxopt_core.stored" in str(caught.value.__cause__)


def test_visitors_have_a_method_for_each_kind() -> None:
    kinds = {kind.visit for kind in edits.Edit.__subclasses__() if kind.__module__ == edits.__name__}
    assert kinds == {name for name in vars(edits.EditVisitor) if not name.startswith("_")}
    assert kinds <= vars(Live).keys()  # undo leaves nothing out


def test_two_kinds_of_one_name_are_refused() -> None:
    @dataclass(frozen=True)
    class NodeAdded(CustomEdit):
        def take_back(self, graph_module: GraphModule) -> None: ...

    with pytest.raises(FxoptError, match=r"has the name of fxopt_rewrite.journal.edits:NodeAdded"):
        stored(NodeAdded)


def test_a_module_of_edits_that_cannot_be_imported_breaks_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        name, value = "broken", "nowhere.edits"

        def load(self) -> None:
            raise ImportError("nowhere")

    monkeypatch.setattr(codec, "entry_points", lambda group: [Point()])
    codec.load_journals.cache_clear()
    text = ledger_to_json(ledger_of(noted()))
    with pytest.warns(RuntimeWarning, match="'broken' of the group fxopt_journal, nowhere.edits, failed to load"):
        ledger = ledger_from_json(text)
    assert len(ledger.records) == 1
    codec.load_journals.cache_clear()


def test_a_kind_that_is_not_installed_is_named() -> None:
    text = ledger_to_json(ledger_of(noted())).replace("SetNote", "NoteLost")
    with pytest.raises(FxoptError, match=r"unknown kind 'NoteLost'.* not installed here"):
        ledger_from_json(text)
