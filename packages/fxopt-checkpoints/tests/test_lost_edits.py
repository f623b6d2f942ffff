"""A ledger whose journals somebody has emptied says nothing of the original, and is never taken to say so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from checkpoint_passes import Fold, Join, model, traced
from torch.fx import GraphModule

from fxopt_checkpoints import key_map, load_original_state_dict, original_state_dict
from fxopt_core import (
    CheckpointError,
    Journal,
    UndoError,
    history,
    ledger_of,
    set_ledger,
    undo,
)
from fxopt_rewrite.journal.journal import Edits


def without_edits(graph_module: GraphModule, journal: Journal | None) -> GraphModule:
    ledger = ledger_of(graph_module)
    set_ledger(graph_module, replace(ledger, records=tuple(replace(each, journal=journal) for each in ledger.records)))
    return graph_module


@pytest.mark.parametrize("journal", [Edits(()), None], ids=["empty", "none"])
@pytest.mark.parametrize(
    "read", [key_map, original_state_dict, lambda graph_module: load_original_state_dict(graph_module, {})]
)
@pytest.mark.parametrize("make", [Join, Fold])
def test_no_keys_are_taken_for_original_ones(
    make: Callable[[], Join], read: Callable[[GraphModule], object], journal: Journal | None
) -> None:
    graph_module = without_edits(make()(traced(model())), journal)
    keys = list(graph_module.state_dict())
    with pytest.raises(CheckpointError, match=r"pass `(join|fold)` names what it replaced, but has lost the edits"):
        read(graph_module)
    assert list(graph_module.state_dict()) == keys


@pytest.mark.parametrize("journal", [Edits(()), None], ids=["empty", "none"])
@pytest.mark.parametrize("take_back", [undo, lambda graph_module: Join()(graph_module, reverse=True)])
def test_nothing_is_recorded_as_undone_that_is_not(
    take_back: Callable[[GraphModule], GraphModule], journal: Journal | None
) -> None:
    graph_module = without_edits(Join()(traced(model())), journal)
    code = graph_module.code
    with pytest.raises(Exception, match="has lost the edits") as caught:
        take_back(graph_module)
    assert isinstance(caught.value, UndoError) or isinstance(caught.value.__cause__, UndoError)
    assert [record.state for record in history(graph_module)] == ["applied"]
    assert graph_module.code == code
