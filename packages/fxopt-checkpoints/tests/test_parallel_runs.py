"""Threads that work on copies of one graph module."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from checkpoint_passes import Join, Model, model
from torch.fx import GraphModule

from fxopt_checkpoints.load import load_original_state_dict, original_state_dict
from fxopt_core import DeepCopy, undo


def exported() -> GraphModule:
    """Return a graph whose fake tensors are all of one mode, which deep copies share."""
    program = torch.export.export(model().eval(), (torch.randn(2, 4),))
    graph_module = program.module()
    assert isinstance(graph_module, GraphModule)
    return graph_module


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch, in a deep copy of an export graph
@pytest.mark.usefixtures("frequent_switches")
def test_copies_are_rewritten_loaded_and_undone_in_several_threads() -> None:
    graph_module = exported()
    checkpoint = model(1).state_dict()

    def work(one: GraphModule) -> list[bool]:
        Join()(one)
        load_original_state_dict(one, checkpoint)
        undo(one)  # the pass
        saved = original_state_dict(one)
        return [torch.equal(saved[key], value) for key, value in checkpoint.items()]

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, [DeepCopy()(graph_module) for _ in range(8)]))
    assert found == [[True] * len(Model().state_dict())] * 8
