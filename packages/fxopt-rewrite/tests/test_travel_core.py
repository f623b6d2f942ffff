"""A saved module in a process that knows neither the model's classes nor the pass."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys

import pytest
import torch
from site_passes import Computes, ReluToClamp
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import (
    UndoError,
    history,
    iter_nodes,
    ledger_of,
    set_ledger,
    undo,
)
from fxopt_rewrite import (
    ledger_from_json,
    ledger_to_json,
)


class Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.linear(x)) + torch.relu(x)


def outer() -> nn.Module:
    return Computes(lambda m, x: m.inner(x), inner=Inner())


def transformed() -> GraphModule:
    torch.manual_seed(0)
    return ReluToClamp()(symbolic_trace(outer()), expect=2)


READER = """
import json, pickle, sys
from fxopt_core import history, tag_of, undo
import torch
graph_module = pickle.load(sys.stdin.buffer)
found = {"computed": graph_module(torch.ones(1, 2)).tolist()}
found["history"] = str(history(graph_module)).splitlines()[2:]
found["made"] = [tag_of(node).origin for node in graph_module.graph.nodes if tag_of(node).origin]
undo(graph_module)
found["nodes"] = [node.name for node in graph_module.graph.nodes]
found["stack"] = [str(node.meta.get("nn_module_stack")) for node in graph_module.graph.nodes]
found["after"] = graph_module(torch.ones(1, 2)).tolist()
print(json.dumps(found))
"""


def test_it_is_undone_there() -> None:
    """Without the classes, which stand as text in module stacks."""
    graph_module = transformed()
    command, expected = [sys.executable, "-c", READER], graph_module(torch.ones(1, 2)).tolist()
    done = subprocess.run(command, input=pickle.dumps(graph_module), stdout=subprocess.PIPE, check=True, timeout=120)
    found = json.loads(done.stdout)
    assert found["computed"] == found["after"] == expected
    assert found["history"] == ["     + relu -> clamp_min", "     + relu_1 -> clamp_min_1"]
    assert found["made"] == [["relu-to-clamp", ["relu"]], ["relu-to-clamp", ["relu_1"]]]
    assert found["nodes"] == [node.name for node in iter_nodes(symbolic_trace(outer()).graph)]
    assert any(f"{__name__}.Inner" in text for text in found["stack"])


def test_names_of_functions_are_imported_only_to_undo() -> None:
    graph_module = transformed()
    text = ledger_to_json(ledger_of(graph_module)).replace("torch:relu", "a_module_that_is_gone:relu")
    set_ledger(graph_module, ledger_from_json(text))
    assert len(history(graph_module)) == 1
    assert ledger_to_json(ledger_of(graph_module)) == text
    before = [node.name for node in iter_nodes(graph_module.graph)]
    with pytest.raises(UndoError, match="node `relu_1` calls or takes something not found here"):
        undo(graph_module)
    assert [node.name for node in iter_nodes(graph_module.graph)] == before
