"""`fxopt list`, `fxopt show`, completion, help."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from command_models import Plugin
from command_runs import fxopt, fxopt_json, on_screen, use_registry
from typer.testing import CliRunner

import fxopt as umbrella
from fxopt.commands.main import build_app
from fxopt.docstrings import parse_docstring
from fxopt_core import Registry, registry
from fxopt_rewrite import REASONS


@pytest.fixture
def passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Registry:
    """A registry of its own, with a broken plugin of another distribution, and with one that works."""
    info = tmp_path / "fxopt_broken-2.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fxopt-broken\nVersion: 2.0\n")
    (info / "entry_points.txt").write_text("[fxopt]\nbroken = fxopt_broken.plugin\n")
    (tmp_path / "fxopt_broken.py").write_text("raise ImportError(\"no module named 'frobnicate'\")\n")
    monkeypatch.syspath_prepend(tmp_path)
    made = use_registry(monkeypatch, Registry())
    made.register(Plugin(), "mine")
    return made


class TestList:
    def test_all_passes_are_listed_by_family_with_versions(self) -> None:
        lines = fxopt("list").stdout.splitlines()
        assert lines[0].split() == ["family", "pass", "version", "undo", "summary"]
        for name, info in registry().available().items():
            (line,) = (line for line in lines if line.split()[1:2] == [name])
            assert line.split()[0] == info.family
            assert info.version in line
            assert info.summary in line
        families = [line.split()[0] for line in lines[1 : lines.index("")]]
        assert families == sorted(families)

    def test_pipelines_are_listed(self) -> None:
        assert re.search(
            r"^inference +fold-weights,fuse-products,fold-batch-norm,merge-linears", fxopt("list").stdout, re.M
        )

    def test_plugins_that_failed_are_listed_with_the_reason(self, passes: Registry) -> None:
        output = fxopt("list").stdout
        assert "failed: plugin 'broken' (of fxopt-broken 2.0) failed to load: ImportError" in output
        assert "frobnicate" in output
        assert "doubles" in output
        (failed,) = fxopt_json("list")["failed"]
        assert failed["plugin"] == "broken"
        assert "ImportError: no module named 'frobnicate'" in failed["error"]

    def test_unknown_passes_come_with_the_allow_list(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FXOPT_PLUGINS", "liner,norm")
        use_registry(monkeypatch, Registry())
        shown = fxopt("show", "merge-linears", code=2).stderr
        assert "it is in fxopt-linear, which is not loaded" in shown
        assert "FXOPT_PLUGINS allows these plugins only: liner,norm" in shown

    def test_tables_have_frames_and_colours_in_a_terminal(self, monkeypatch: pytest.MonkeyPatch) -> None:
        code, shown = on_screen(monkeypatch, "list")
        assert code == 0
        assert "\x1b[" in shown
        assert "─" in shown

    def test_data_for_scripts(self) -> None:
        data = fxopt_json("list")
        (merge,) = (info for info in data["passes"] if info["name"] == "merge-linears")
        assert merge["family"] == "linear"
        assert merge["distribution"] == "fxopt-linear"
        assert merge["options"][0] == {"name": "min-group", "type": "int", "default": 2}
        assert {"name": "inference", "text": registry().pipelines()["inference"]} in data["pipelines"]


class TestShow:
    def test_all_that_is_known_of_a_pass(self) -> None:
        output = fxopt("show", "merge-linears").stdout
        for text in (
            "merge-linears (linear, fxopt-linear ",
            "linear layers that share their inputs become one",
            "can be undone",
            "computes the same",
            "the least number of layers in a group",
            "Remove them, or make them permanent",
        ):
            assert text in output
        assert ">>>" not in output

    @pytest.mark.parametrize("name", list(registry().available()))
    def test_every_pass_can_be_shown(self, name: str) -> None:
        data = fxopt_json("show", name)
        assert data["summary"]
        assert all(option["meaning"] for option in data["options"])
        assert data["reasons"] == registry().available()[name].transformation.reasons

    def test_a_pipeline_shows_its_passes(self) -> None:
        assert fxopt_json("show", "inference")["passes"][-2:] == ["merge-linears", "change-true-div-to-mul-by-inverse"]
        assert "  merge-linears\n" in fxopt("show", "inference").stdout

    def test_an_unknown_pass_names_close_ones(self) -> None:
        assert "did you mean merge-linears" in fxopt("show", "merge-linear", code=2).stderr
        assert fxopt_json("show", "merge-linear", code=2)["error"]["kind"] == "UnknownPassError"

    def test_source_and_cost_are_shown(self) -> None:
        output = fxopt("show", "fuse-batch-norm2d-in-conv2d").stdout
        assert "\nsource: Ioffe and Szegedy" in output
        assert "\ncost: One operation fewer" in output

    def test_own_reasons_come_first_and_general_ones_follow(self) -> None:
        reasons = list(fxopt_json("show", "merge-linears")["reasons"])
        assert reasons[:3] == ["group-too-small", "mixed-mode", "opaque-call"]
        assert reasons[3:] == sorted(REASONS)

    def test_a_pass_that_refuses_nothing_lists_no_reasons(self, passes: Registry) -> None:
        output = fxopt("show", "doubles").stdout
        assert "leaves a site alone" not in output
        assert "cannot be undone" in output
        assert "changes what is computed" in output


def test_a_class_without_docstring_has_empty_parts() -> None:
    class Bare:
        pass

    assert parse_docstring(Bare).summary == parse_docstring(Bare).body == ""


@pytest.mark.parametrize(("typed", "completed"), [("fxopt op", "optimize"), ("fxopt optimize x --exp", "--expect")])
def test_shells_complete(
    typed: str, completed: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("_FXOPT_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", typed)
    monkeypatch.setenv("COMP_CWORD", str(len(typed.split()) - 1))
    with pytest.raises(SystemExit):
        build_app(plain=True)([], prog_name="fxopt")
    assert capsys.readouterr().out.split() == [completed]


class TestHelp:
    @pytest.mark.parametrize("command", [command.name for command in build_app(plain=True).registered_commands])
    def test_every_command_explains_itself(self, command: str) -> None:
        output = fxopt(command, "--help").stdout
        assert output.startswith("Usage: ")
        assert "--json" in output
        assert command in fxopt("--help").stdout

    @pytest.mark.parametrize("plain", [True, False])
    def test_summaries_are_whole(self, plain: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        """At 80 columns, in a terminal and elsewhere."""
        monkeypatch.setenv("COLUMNS", "80")
        output = CliRunner().invoke(build_app(plain=plain), ["--help"]).stdout.partition("Commands")[2]
        lines = [line.strip("│ ") for line in output.splitlines()[1:] if line.strip("─╭╮╰╯│ \n")]
        assert len(lines) == 10
        assert all(line.endswith(".") and not line.endswith("...") for line in lines)

    def test_version(self) -> None:
        assert fxopt("--version").stdout == f"fxopt {umbrella.__version__}\n"

    def test_an_unknown_command_or_option_is_a_wrong_command_line(self) -> None:
        assert "No such command" in fxopt("lisst", code=2).stderr
        assert "--familly" in fxopt("list", "--familly", code=2).stderr
        assert "Missing argument" in fxopt("show", code=2).stderr
