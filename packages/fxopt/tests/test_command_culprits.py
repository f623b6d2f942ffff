"""`fxopt bisect` and `bench`; reports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from command_models import Plugin
from command_runs import fxopt, fxopt_json, use_registry
from torch.utils._python_dispatch import TorchDispatchMode

import fxopt_tools
from fxopt_capture.archive.files import load
from fxopt_core import Registry

ATTENTION = "command_models:attention"


@pytest.fixture
def own_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes that fail, and that are wrong, beside those that are installed."""
    use_registry(monkeypatch, Registry()).register(Plugin(), "mine")


class Ticking(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
    """A clock of which every operation takes a millisecond."""

    seconds = 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seconds += 1e-3
        return func(*args, **(kwargs or {}))


@pytest.fixture
def ticking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `bench` measure by that clock."""

    def with_clock(measure: Any) -> Any:
        def measured(*arguments: Any, **options: Any) -> Any:
            with Ticking() as clock:  # type: ignore[no-untyped-call]  # the same
                return measure(*arguments, clock=lambda: clock.seconds, **options)

        return measured

    for name in ("bench", "compare_pipelines"):
        monkeypatch.setattr(fxopt_tools, name, with_clock(getattr(fxopt_tools, name)))


@pytest.mark.usefixtures("folder", "own_passes")
class TestBisect:
    def test_a_wrong_pass(self) -> None:
        data = fxopt_json("bisect", ATTENTION, "-p", "merge-linears,doubles,fuse-bias-in-linear")
        assert data["culprit"]["pass"] == "doubles"
        assert data["culprit"]["site"] is None
        assert len(data["checks"]) <= 4
        assert "output" in data["culprit"]["problem"]

    def test_nothing_to_find(self) -> None:
        assert "no culprit" in fxopt("bisect", ATTENTION, code=9).stdout
        data = fxopt_json("bisect", ATTENTION, "-p", "merge-linears", code=9)
        assert data["verdict"] == "never-fails"
        assert data["culprit"] is None

    def test_a_check_of_ones_own(self) -> None:
        data = fxopt_json("bisect", ATTENTION, "-p", "merge-linears", "--check", "command_models:has_q")
        assert data["culprit"]["site"] == "q + k + v"
        assert data["culprit"]["problem"] == "the check returned False"
        assert any("command_models.py" in line for line in data["culprit"]["sources"])
        output = fxopt("bisect", ATTENTION, "-p", "merge-linears", "--check", "command_models:has_q").stdout
        assert "is the culprit, found by" in output

    def test_tolerances(self) -> None:
        doubled = (ATTENTION, "-p", "doubles")
        assert fxopt_json("bisect", *doubled)["verdict"] == "found"
        assert fxopt_json("bisect", *doubled, "--atol", "100", code=9)["verdict"] == "never-fails"
        assert fxopt_json("bisect", *doubled, "--rtol", "100", code=9)["verdict"] == "never-fails"
        assert fxopt_json("bisect", *doubled, "--rtol", "0.1", "--atol", "0")["verdict"] == "found"

    def test_wrong_options(self) -> None:
        assert "does not name a function" in fxopt("bisect", ATTENTION, "--check", "has_q", code=3).stderr
        arguments = ("bisect", ATTENTION, "--check", "command_models:has_q", "--rtol", "0.1")
        assert "--check does not use them" in fxopt(*arguments, code=2).stderr

    def test_optimize_says_how_to_find_it(self) -> None:
        message = fxopt("optimize", ATTENTION, "-p", "doubles", "-o", "out.fxopt", code=7).stderr
        assert f"fxopt bisect {ATTENTION} -p doubles, with the same inputs" in message


@pytest.mark.usefixtures("folder", "ticking")
class TestBench:
    def test_a_pipeline(self) -> None:
        data = fxopt_json("bench", ATTENTION, "-p", "merge-linears", "--rounds", 8)
        assert data["verdict"] in ("faster", "slower")
        assert data["noise"] < 1e-9
        assert data["speedup"]["low"] == pytest.approx(data["speedup"]["high"])
        assert data["original"]["rounds"] == 8
        assert data["contributions"] == []
        assert "speed-up: " in fxopt("bench", ATTENTION, "-p", "merge-linears", "--rounds", 8).stdout

    def test_without_a_pipeline_the_named_ones_are_compared(self) -> None:
        data = fxopt_json("bench", ATTENTION, "--rounds", 8)
        names = ["inference", "cpu-inference", "cpu-inference-bf16", "cpu-inference-int8"]
        assert [each["name"] for each in data["pipelines"]] == names
        assert [each["exact"] for each in data["pipelines"]] == [True, True, False, False]
        assert data["best"] in (None, "inference", "cpu-inference")
        assert all(each["problem"] is None and each["sqnr_db"] > 20 for each in data["pipelines"])
        shown = fxopt("bench", ATTENTION, "--rounds", 8).stdout
        assert "times as fast" in shown
        assert "take " in shown or "leave the model as it is" in shown

    @pytest.mark.parametrize(("per", "name"), [("pass", "merge-linears"), ("site", "merge-linears on q + k + v")])
    def test_parts(self, per: str, name: str) -> None:
        data = fxopt_json("bench", ATTENTION, "-p", "merge-linears", "--rounds", 8, "--per", per)
        assert [each["name"] for each in data["contributions"]] == [name]

    @pytest.mark.parametrize("arguments", [("--rounds", 7), ("--per", "node"), ("-p", "merge-linear")])
    def test_wrong_options(self, arguments: tuple[Any, ...]) -> None:
        fxopt("bench", ATTENTION, *arguments, code=2)

    def test_a_pass_that_fails(self, own_passes: None) -> None:
        assert "out of ideas" in fxopt("bench", ATTENTION, "-p", "fails", "--rounds", 8, code=5).stderr


@pytest.mark.usefixtures("folder")
class TestReport:
    def test_a_page_that_loads_nothing(self) -> None:
        data = fxopt_json("optimize", ATTENTION, "-p", "merge-linears", "-o", "out.fxopt", "--report", "report.html")
        assert data["report"] == "report.html"
        page = Path("report.html").read_text(encoding="utf-8")
        assert "q_k_v_merged" in page
        assert "passed" in page
        assert 'src="http' not in page

    def test_one_that_exists_is_not_touched(self) -> None:
        Path("report.html").write_text("mine")
        arguments = ("optimize", ATTENTION, "-p", "merge-linears", "-o", "out.fxopt", "--report", "report.html")
        assert "--force to replace it" in fxopt(*arguments, code=3).stderr
        assert not Path("out.fxopt").exists()
        assert Path("report.html").read_text() == "mine"
        fxopt(*arguments, "--force")
        load("out.fxopt")
