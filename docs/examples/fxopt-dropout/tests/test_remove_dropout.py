import torch
from torch import nn

from fxopt_core import registry


def test_dropout_is_removed_in_eval_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(), nn.ReLU()).eval()
    graph_module = registry().create("remove-dropout")(torch.fx.symbolic_trace(model))
    x = torch.randn(3, 4)
    assert [str(node.target) for node in graph_module.graph.find_nodes(op="call_module")] == ["0", "2"]
    assert torch.equal(graph_module(x), model(x))


def test_dropout_stays_in_train_mode() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout())
    graph_module = registry().create("remove-dropout")(torch.fx.symbolic_trace(model))
    assert len(graph_module.graph.find_nodes(op="call_module")) == 2


def test_it_composes_with_other_passes_by_text() -> None:
    model = nn.Sequential(nn.Dropout(), nn.Dropout()).eval()
    graph_module = registry().pipeline("remove-dropout,remove-dropout")(torch.fx.symbolic_trace(model))
    assert not graph_module.graph.find_nodes(op="call_module")


def test_the_registry_names_its_distribution() -> None:
    info = registry().available()["remove-dropout"]
    assert (info.family, info.distribution, info.version) == ("dropout", "fxopt-dropout", "0.1.0")
