"""`fxopt verify`, `undo`, `history` and `view` on archives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from command_models import attention, seeded
from command_runs import fxopt, fxopt_json
from site_passes import Computes
from torch import nn

from fxopt_capture.archive.files import load, save
from fxopt_capture.capture import capture
from fxopt_core import compose, history
from fxopt_linear.fuse_bias import FuseBiasInLinear
from fxopt_linear.merge_linears import MergeLinears
from fxopt_norm.linear import FuseBatchNorm1dInLinear


def pair() -> nn.Module:
    """Two layers that merge."""
    return Computes(lambda m, x: m.q(x) + m.k(x), q=nn.Linear(4, 4), k=nn.Linear(4, 4))


@pytest.fixture(scope="module")
def archives(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of archives, which tests only read."""
    return tmp_path_factory.mktemp("archives")


@pytest.fixture(scope="module")
def before(archives: Path) -> Path:
    """The archive of a model."""
    save(capture(*attention()), archives / "before.fxopt")
    return archives / "before.fxopt"


@pytest.fixture(scope="module")
def after(archives: Path) -> Path:
    """The same, after two runs."""
    graph_module = FuseBiasInLinear()(MergeLinears()(capture(*attention())))
    save(graph_module, archives / "after.fxopt")
    return archives / "after.fxopt"


@pytest.fixture(scope="module")
def folded(archives: Path) -> Path:
    """An archive that cannot be undone."""
    path = archives / "folded.fxopt"
    fxopt("optimize", "command_models:folding", "-p", "fold-batch-norm", "-o", path)
    return path


class TestVerify:
    def test_equal(self, before: Path, after: Path) -> None:
        assert fxopt("verify", before, after).stdout.startswith("passed: 1 tensor compared")
        data = fxopt_json("verify", before, after)
        assert data["passed"]
        assert data["outputs"][0]["rtol"] == 1e-4

    def test_a_factory_brings_the_inputs(self, after: Path) -> None:
        assert fxopt_json("verify", "command_models:attention", after)["outputs"][0]["shape"] == [2, 5, 4]

    def test_inputs_from_a_file(self, before: Path, after: Path, tmp_path: Path) -> None:
        torch.save(torch.randn(7, 5, 8), tmp_path / "x.pt")
        data = fxopt_json("verify", before, after, "--inputs", tmp_path / "x.pt")
        assert data["outputs"][0]["shape"] == [7, 5, 4]

    def test_other_numbers(self, before: Path, tmp_path: Path) -> None:
        model = seeded()
        with torch.no_grad():
            model.get_parameter("v.weight").mul_(1.01)
        save(capture(model, attention()[1]), tmp_path / "other.fxopt")
        result = fxopt("verify", before, tmp_path / "other.fxopt", code=7)
        assert "FAILED" in result.stdout
        assert fxopt_json("verify", before, tmp_path / "other.fxopt", code=7)["passed"] is False
        fxopt("verify", before, tmp_path / "other.fxopt", "--rtol", "0.1", "--atol", "0.1")

    def test_models_that_take_other_inputs(self, before: Path, folded: Path) -> None:
        assert "refuses input 0" in fxopt("verify", before, folded, code=3).stderr

    @pytest.mark.parametrize("value", ["-1", "x"])
    def test_wrong_tolerances(self, before: Path, value: str) -> None:
        assert "--rtol" in fxopt("verify", before, before, f"--rtol={value}", code=2).stderr
        fxopt("verify", before, before, "--rtol=inf", code=3)


class TestHistory:
    def test_table(self, after: Path) -> None:
        assert fxopt("history", "--verbose", after).stdout == f"{history(load(after))}\n"

    def test_data(self, after: Path) -> None:
        assert fxopt_json("history", after) == json.loads(history(load(after)).to_json())

    def test_sites_are_summarised(self, tmp_path: Path) -> None:
        path = tmp_path / "pairs.fxopt"
        pairs = nn.Sequential(pair(), pair(), pair())
        save(compose(FuseBatchNorm1dInLinear(), MergeLinears())(capture(pairs, torch.ones(2, 4))), path)
        heading, merged, sites, idle = fxopt("history", path).stdout.splitlines()
        assert (heading[:3], merged.split()[:2]) == ("run", ["0.1", "merge-linears"])
        assert sites == "     + 0: q + k -> q_k_merged, and 2 more sites"
        assert idle == "nothing to do for fuse-batch-norm1d-in-linear"
        assert len(fxopt("history", path, "-v").stdout.splitlines()) == 6


class TestUndo:
    def test_the_last_run(self, after: Path, tmp_path: Path) -> None:
        data = fxopt_json("undo", after, "-o", tmp_path / "back.fxopt")
        assert data["undone"] == ["fuse-bias-in-linear"]
        back = load(tmp_path / "back.fxopt")
        assert "q_k_v_merged.weight" in back.state_dict()
        assert [record.state for record in history(back)] == ["applied", "undone"]

    def test_all_runs(self, after: Path, tmp_path: Path) -> None:
        output = fxopt("undo", after, "-o", tmp_path / "back.fxopt", "--all").stdout
        assert output.splitlines()[:2] == ["undone: fuse-bias-in-linear", "undone: merge-linears"]
        found, expected = load(tmp_path / "back.fxopt").state_dict(), seeded().state_dict()
        assert list(found) == list(expected)
        assert all(torch.equal(found[key], expected[key]) for key in found)

    def test_nothing_to_undo(self, before: Path, tmp_path: Path) -> None:
        arguments = ("undo", before, "-o", tmp_path / "back.fxopt")
        assert "has no run to undo" in fxopt(*arguments, code=8).stderr
        assert fxopt_json(*arguments, code=8)["error"]["kind"] == "NothingToUndo"
        assert not (tmp_path / "back.fxopt").exists()

    def test_what_cannot_be_undone(self, folded: Path, tmp_path: Path) -> None:
        assert "cannot be undone" in fxopt("undo", folded, "-o", tmp_path / "back.fxopt", code=8).stderr
        assert not (tmp_path / "back.fxopt").exists()
