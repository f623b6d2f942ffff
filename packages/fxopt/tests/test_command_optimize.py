"""`fxopt optimize`: what it writes, demands, verifies and refuses."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from command_models import Plugin, attention
from command_runs import fxopt, fxopt_json, use_registry

from fxopt_capture.archive.files import load, save
from fxopt_capture.capture import capture
from fxopt_core import Registry, history, registry, undo

ATTENTION = "command_models:attention"


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """Where to write."""
    return tmp_path / "out.fxopt"


@pytest.fixture
def own_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that fail, and that are wrong, beside those that are installed."""
    use_registry(monkeypatch, Registry()).register(Plugin(), "mine")


class TestSources:
    def test_a_factory(self, out: Path) -> None:
        fxopt("optimize", ATTENTION, "-p", "merge-linears", "-o", out)
        loaded = load(out)
        model, (x,) = attention()
        torch.testing.assert_close(loaded(x), model(x))
        assert "q_k_v_merged.weight" in loaded.state_dict()
        assert [record.pass_name for record in history(loaded)] == ["merge-linears"]
        undo(loaded)
        assert all(torch.equal(value, model.state_dict()[key]) for key, value in loaded.state_dict().items())

    @pytest.mark.parametrize("factory", ["by_name", "talkative", "traced"])
    def test_factories_of_other_kinds(self, factory: str, out: Path) -> None:
        data = fxopt_json("optimize", f"command_models:{factory}", "-p", "merge-linears", "-o", out)
        assert data["verification"]["passed"]

    def test_what_a_factory_prints_goes_to_standard_error(self, out: Path) -> None:
        result = fxopt("optimize", "command_models:talkative", "-p", "merge-linears", "-o", out, "--json")
        assert "hello from the factory" in result.stderr
        json.loads(result.stdout)

    def test_a_program_of_torch(self, tmp_path: Path, out: Path) -> None:
        model, args = attention()
        plain = tmp_path / "plain.pt2"
        torch.export.save(torch.export.export(model, args), plain)
        assert "torch.export.load(" in fxopt("optimize", plain, "-o", out, code=3).stderr

    def test_an_archive_that_was_optimized_before_keeps_its_history(self, tmp_path: Path, out: Path) -> None:
        fxopt("optimize", ATTENTION, "-p", "merge-linears", "-o", tmp_path / "first.fxopt")
        data = fxopt_json("optimize", tmp_path / "first.fxopt", "-p", "fuse-bias-in-linear", "-o", out)
        assert [entry["pass"] for entry in data["passes"]] == ["fuse-bias-in-linear"]
        assert [record.pass_name for record in history(load(out))] == ["merge-linears", "fuse-bias-in-linear"]

    def test_inputs_from_a_file(self, tmp_path: Path, out: Path) -> None:
        torch.save([(torch.randn(2, 5, 8),), {"x": torch.randn(3, 5, 8)}], tmp_path / "inputs.pt")
        arguments = ("optimize", "command_models:seeded", "-p", "merge-linears", "-o", out)
        data = fxopt_json(*arguments, "--inputs", tmp_path / "inputs.pt")
        assert [output["input"] for output in data["verification"]["outputs"]] == [0, 1]


class TestAnswer:
    def test_data(self, out: Path) -> None:
        data = fxopt_json("optimize", ATTENTION, "-p", "merge-linears{min-group=3}", "-o", out)
        assert data["pipeline"] == "merge-linears{min-group=3}"
        assert data["output"] == str(out)
        assert data["bytes"] == out.stat().st_size
        assert data["before"]["parameters"] == 6
        assert data["after"]["parameters"] == 2
        (entry,) = data["passes"]
        assert entry["rewritten"][0]["site"] == "q + k + v"
        (output,) = data["verification"]["outputs"]
        assert output["path"] == "output"
        assert output["max_absolute_error"] < 1e-5

    def test_nothing_to_rewrite_is_said_and_is_no_error(self, out: Path) -> None:
        assert ": 0 sites rewritten" in fxopt("optimize", ATTENTION, "-p", "fold-batch-norm", "-o", out).stdout

    def test_the_default_pipeline(self, out: Path) -> None:
        data = fxopt_json("optimize", ATTENTION, "-o", out)
        assert data["pipeline"] == registry().pipeline_text(registry().pipeline("cpu-inference"))

    def test_without_verification(self, out: Path, own_passes: None) -> None:
        arguments = ("optimize", ATTENTION, "-p", "doubles", "-o", out, "--no-verify", "--force")
        assert "not verified" in fxopt(*arguments).stdout
        assert fxopt_json(*arguments)["verification"] is None

    def test_sites_are_summarised_unless_all_are_wanted(self, out: Path) -> None:
        arguments = ("optimize", "command_models:six_layers", "-p", "merge-linears", "-o", out, "--force")
        summary = fxopt(*arguments).stdout
        assert summary.count("-> q_k_v_merged") == 1
        assert "and 1 more site" in summary
        assert fxopt(*arguments, "--verbose").stdout.count("-> q_k_v_merged") == 2


def test_a_report_that_fails_costs_no_archive(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*arguments: Any, **options: Any) -> None:
        raise ValueError("two\nlines")

    monkeypatch.setattr("fxopt_report.report", broken)
    page = out.with_suffix(".html")
    result = fxopt("optimize", ATTENTION, "-p", "merge-linears", "-o", out, "--report", page, code=10)
    assert result.stderr == f"error: {out} is saved, but the report failed: ValueError: two lines\n"
    load(out)
    assert not page.exists()


class TestDemands:
    def test_met(self, out: Path) -> None:
        fxopt("optimize", ATTENTION, "-p", "merge-linears", "-o", out, "--expect", 1, "--strict")

    def test_another_number_of_sites(self, out: Path) -> None:
        result = fxopt("optimize", ATTENTION, "-p", "merge-linears", "-o", out, "--expect", 2, code=6)
        assert "rewrote 1 site, expected exactly 2" in result.stderr
        assert not out.exists()

    def test_a_refusal(self, out: Path) -> None:
        arguments = ("optimize", "command_models:lonely", "-p", "merge-linears{min-group=3}", "-o", out)
        assert "group-too-small" in fxopt(*arguments, "--strict", code=6).stderr
        assert fxopt_json(*arguments, "--strict", code=6)["error"]["kind"] == "PreconditionError"
        assert not out.exists()
        fxopt(*arguments)


@pytest.mark.usefixtures("own_passes")
class TestFailures:
    def test_an_old_output_survives_a_pass_that_fails_in_the_middle(self, out: Path) -> None:
        out.write_text("mine")
        result = fxopt("optimize", ATTENTION, "-p", "merge-linears,fails", "-o", out, "--force", code=5)
        assert "pass `fails`" in result.stderr
        assert "out of ideas" in result.stderr
        assert [path.name for path in out.parent.iterdir()] == ["out.fxopt"]
        assert out.read_text() == "mine"

    def test_wrong_numbers(self, out: Path) -> None:
        error = fxopt_json("optimize", ATTENTION, "-p", "doubles", "-o", out, code=7)["error"]
        assert "does not compute what the original does" in error["message"]
        assert (error["exit_code"], error["kind"]) == (7, "VerificationError")
        assert not out.exists()

    def test_stated_tolerances(self, out: Path) -> None:
        fxopt("optimize", ATTENTION, "-p", "doubles", "-o", out, "--rtol", 2, "--atol", 2)

    def test_a_mistake_in_the_command_shows_a_traceback(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*arguments: Any, **options: Any) -> None:
            raise AssertionError("a mistake")

        monkeypatch.setattr("fxopt.commands.models.sources.capture", broken)
        result = fxopt("optimize", ATTENTION, "-o", out, code=1)
        assert "Traceback" in result.stderr
        assert "unexpected AssertionError: a mistake" in result.stderr


class TestInterrupts:
    def test_while_saving(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(number: int) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "fsync", interrupted)
        out.write_text("mine")
        result = fxopt("optimize", ATTENTION, "-p", "merge-linears", "-o", out, "--force", code=130)
        assert "interrupted" in result.stderr
        assert "Traceback" not in result.stderr
        assert [path.name for path in out.parent.iterdir()] == ["out.fxopt"]
        assert out.read_text() == "mine"


class TestCommandLine:
    def test_a_mistake_in_the_pipeline_has_a_caret_under_its_column(self, out: Path) -> None:
        text = "merge-linears{min-group=},fold-batch-norm"
        lines = fxopt("optimize", ATTENTION, "-p", text, "-o", out, code=2).stderr.splitlines()
        place = lines.index(f"  {text}")
        assert lines[place + 1] == " " * (2 + text.index("}")) + "^"

    def test_mistakes_are_found_before_the_work_begins(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("fxopt.commands.models.sources.read_source", None)
        fxopt("optimize", ATTENTION, "-p", "merge-linear", "-o", out, code=2)
        fxopt("optimize", ATTENTION, "-o", out.with_suffix(".onnx"), code=3)


class TestOutput:
    def test_the_source_itself(self, out: Path) -> None:
        save(capture(*attention()), out)
        fxopt("optimize", out, "-o", out, "--force", "-p", "merge-linears")
        assert history(load(out))

    @pytest.mark.parametrize(
        ("name", "words"),
        [
            ("model.onnx", "does not end in '.fxopt'"),
            ("nowhere/model.fxopt", "there is no folder"),
            ("folder.fxopt", "is a folder"),
            ("model.pt2", "does not end in '.fxopt'"),
        ],
    )
    def test_wrong_paths(self, name: str, words: str, tmp_path: Path) -> None:
        (tmp_path / "folder.fxopt").mkdir()
        assert words in fxopt("optimize", ATTENTION, "-o", tmp_path / name, code=3).stderr

    def test_a_disk_that_is_full(self, out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def full(*arguments: Any, **options: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(os, "fsync", full)
        assert "No space left" in fxopt("optimize", ATTENTION, "-p", "merge-linears", "-o", out, code=3).stderr
        assert list(out.parent.iterdir()) == []

    def test_a_graph_that_cannot_be_saved(self, out: Path) -> None:
        result = fxopt("optimize", "command_models:traced_with_hook", "-p", "merge-linears", "-o", out, code=4)
        assert "has a forward hook" in result.stderr
        assert list(out.parent.iterdir()) == []

    def test_a_program_of_torch_is_an_output_of_export(self, out: Path) -> None:
        program = out.with_suffix(".pt2")
        fxopt("optimize", ATTENTION, "-p", "merge-linears", "-o", out)
        assert fxopt_json("export", out, "-o", program)["bytes"] == program.stat().st_size
        assert "q_k_v_merged.weight" in torch.export.load(program).state_dict
        assert "--output" in fxopt("export", out, code=2).stderr
