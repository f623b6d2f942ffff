"""The installed families together: what the registry offers, and pipelines that go across families."""

from __future__ import annotations

import pickle
from copy import deepcopy

import pytest
import torch
from torch import Tensor, nn

from fxopt_core import PassError, Transformation, compose, history, iter_nodes, registry, undo
from fxopt_rewrite import infer_shapes

APPROXIMATE = [
    "fuse-linears{weights='int8' min-weights=1}",
    "fuse-linears{weights='bfloat16'}",
    "fuse-convolutions{weights='int8' min-weights=1 min-channels=1}",
]
REVERSIBLE = "merge-linears,fuse-bias-in-linear,change-true-div-to-mul-by-inverse"
ALL = f"fuse-batch-norm2d-in-conv2d,fuse-batch-norm1d-in-linear,{REVERSIBLE}"


class Mixed(nn.Module):
    """Something for every family."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 8, 3)
        self.conv_norm = nn.BatchNorm2d(8)
        self.dense = nn.Linear(8, 6)
        self.dense_norm = nn.BatchNorm1d(6)
        self.q, self.k = nn.Linear(6, 4), nn.Linear(6, 2)

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        pooled = self.conv_norm(self.conv(images)).relu().mean((2, 3))
        hidden = self.dense_norm(self.dense(pooled))
        return self.q(hidden) / 3.0, self.k(hidden)


@pytest.fixture
def model() -> nn.Module:
    """The model, with statistics that are not those of a new one."""
    torch.manual_seed(0)
    model = Mixed()
    with torch.no_grad():
        for _ in range(3):
            model(torch.randn(8, 3, 9, 9) + 1)
    return model.eval()


def test_all_plugins_load() -> None:
    """None of the installed plugins fails."""
    assert not registry().failed


def test_a_pass_is_told_in_text_and_read_back() -> None:
    """Each pass with its defaults: one text, equal passes, and a pickle that is the same pass."""
    for name in registry().available():
        made = registry().create(name)
        assert registry().pipeline(registry().pipeline_text(made)) == made
        assert pickle.loads(pickle.dumps(made)) == made
        assert hash(registry().create(name)) == hash(made)


def test_signatures_tell_passes_apart() -> None:
    """No two passes share a signature."""
    signatures = [registry().create(name).signature for name in registry().available()]
    assert len(set(signatures)) == len(signatures)


@pytest.mark.parametrize("text", [REVERSIBLE, ALL])
def test_a_pipeline_across_families_computes_the_same(text: str, model: nn.Module) -> None:
    """One batch size and another, and the caller's model as it was."""
    before = deepcopy(model.state_dict())
    transformed = registry().pipeline(text)(torch.fx.symbolic_trace(model))
    for rows in (1, 4):
        images = torch.randn(rows, 3, 9, 9)
        torch.testing.assert_close(transformed(images), model(images), rtol=1e-4, atol=1e-5)
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("text", APPROXIMATE)
def test_a_pass_that_approximates_keeps_its_promise(text: str, model: nn.Module) -> None:
    """The ratio of signal to error is no smaller than what it declares."""
    transformation = registry().pipeline(text)
    transformed = transformation(torch.fx.symbolic_trace(model))
    if "no-operators" in {refusal.reason for refusal in history(transformed)[-1].refusals}:
        pytest.skip("this processor has no instructions for bfloat16")
    assert history(transformed)[-1].rewrites
    images = torch.randn(4, 3, 9, 9)
    with torch.no_grad():
        found, expected = (torch.cat(computing(images), -1) for computing in (transformed, model))
    ratio = 10 * torch.log10(expected.square().sum() / (found - expected).square().sum())
    assert transformation.promised_sqnr is not None
    assert ratio > transformation.promised_sqnr


def test_each_family_finds_its_site(model: nn.Module) -> None:
    """With shapes known, each finds what is its own; the folds leave layers that the merge then finds."""
    graph_module = infer_shapes(torch.fx.symbolic_trace(model), torch.randn(2, 3, 9, 9))
    transformed = registry().pipeline(ALL)(graph_module)
    assert [len(record.rewrites) for record in history(transformed)] == [1, 1, 1, 2, 1]


def test_a_reversible_pipeline_is_undone_as_a_whole(model: nn.Module) -> None:
    """Graph, keys and values are those of before."""
    graph_module = torch.fx.symbolic_trace(model)
    names = [node.name for node in iter_nodes(graph_module.graph)]
    transformed = registry().pipeline(REVERSIBLE)(graph_module)
    assert [node.name for node in iter_nodes(transformed.graph)] != names
    restored = undo(transformed)
    assert [node.name for node in iter_nodes(restored.graph)] == names
    assert list(restored.state_dict()) == list(model.state_dict())
    assert all(torch.equal(restored.state_dict()[key], value) for key, value in model.state_dict().items())


def test_a_pass_that_raises_takes_the_earlier_ones_back(model: nn.Module) -> None:
    """Families share one transaction."""

    class Broken(Transformation):
        def transform(self, graph_module: torch.fx.GraphModule) -> torch.fx.GraphModule:
            raise RuntimeError("broken on purpose")

    graph_module = torch.fx.symbolic_trace(model)
    before = str(graph_module.graph)
    with pytest.raises(PassError, match="broken"):
        compose(registry().pipeline(ALL), Broken())(graph_module)
    assert str(graph_module.graph) == before
    assert not history(graph_module)
