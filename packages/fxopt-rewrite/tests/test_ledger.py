from __future__ import annotations

import copy
import dataclasses
import operator

import pytest
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import Ledger, Record, Refusal, Rewrite, history, ledger_of, set_ledger
from fxopt_rewrite import (
    ModuleAdded,
    NodeAdded,
    NodeRow,
    Piece,
)
from fxopt_rewrite.journal.edits import Ref
from fxopt_rewrite.journal.journal import Edits

ROW = NodeRow(3, "call_function", operator.add, (Ref(1),), (), "add", None, 2)


def traced() -> GraphModule:
    return symbolic_trace(nn.ReLU())


def a_record() -> Record:
    refusals = (Refusal("b", "hooks", "has hooks"),)
    return Record("a-pass", "m:APass", (), "s", (Rewrite("a"),), refusals, journal=Edits((NodeAdded(ROW),)))


class TestLedger:
    def test_starts_empty_and_leaves_no_trace_when_read(self) -> None:
        graph_module = traced()
        assert history(graph_module) == ()
        assert ledger_of(graph_module) == Ledger()
        assert graph_module.meta == {}

    @pytest.mark.parametrize(
        "item",
        [Ledger(), a_record(), Refusal("a", "b", "c"), Rewrite("a"), Piece("a"), ROW, ModuleAdded("a", "b", ())],
        ids=lambda item: type(item).__name__,
    )
    def test_is_immutable(self, item: object) -> None:
        assert dataclasses.is_dataclass(item)
        for field in dataclasses.fields(item):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(item, field.name, None)

    def test_deep_copies_share_it(self) -> None:
        graph_module = traced()
        set_ledger(graph_module, Ledger((a_record(),)))
        twin = copy.deepcopy(graph_module)
        assert ledger_of(twin) is ledger_of(graph_module)
        set_ledger(twin, Ledger((a_record(), a_record())))
        assert (len(history(graph_module)), len(history(twin))) == (1, 2)

    def test_what_others_put_in_its_place_is_no_ledger(self) -> None:
        graph_module = traced()
        graph_module.meta["fxopt"] = {"records": 3}
        assert history(graph_module) == ()
