"""The suite of benchmarks: what it says of times, memory and peers is so; the pages are those of the files."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from benchmarks.apart import Make, Ready, Timed, cases_apart, rounds_apart
from benchmarks.page import PAGE, page
from benchmarks.peak_memory import peak_of
from benchmarks.plans import slower, ways_of
from benchmarks.results import FOLDER, Results, read, read_all, write
from benchmarks.suite import Absent, Measured, Row, Settings, Table, shuffled_rounds
from benchmarks.topics import TOPICS

import fxopt
from benchmarks import machine, summary

ROOT = Path(__file__).parent.parent
MEBIBYTE = 2**20


class Clock:
    """Time that passes as it is told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        """Seconds."""
        return self.now

    def task(self, seconds: float) -> Callable[[], None]:
        """What takes so long."""

        def run() -> None:
            self.now += seconds

        return run


def test_rounds_give_the_seconds_of_one_call_in_every_round() -> None:
    clock = Clock()
    tasks = {"slow": clock.task(0.5), "fast": clock.task(0.001)}
    seconds = shuffled_rounds(tasks, 5, sample_seconds=0.1, clock=clock)
    assert {name: len(values) for name, values in seconds.items()} == {"slow": 5, "fast": 5}
    assert seconds["slow"] == pytest.approx([0.5] * 5)
    assert seconds["fast"] == pytest.approx([0.001] * 5)
    assert Measured.ratio(seconds["slow"], seconds["fast"]).median == pytest.approx(500)


@pytest.mark.nightly
def test_engines_apart_are_measured_in_rounds_and_failures_are_told() -> None:
    makes: dict[str, Make] = {
        "slow": partial(Ready, partial(time.sleep, 0.04), {"kind": "sleeper"}),
        "fast": partial(Ready, partial(time.sleep, 0.01), {}),
        "raises": partial(Ready, partial(int, "text"), {}),
        "dies": partial(os._exit, 3),
        "absent": partial(Absent, "not installed"),
    }
    found = rounds_apart(makes, Settings(rounds=2, threads=1))
    slow, fast = found["slow"], found["fast"]
    assert isinstance(slow, Timed)
    assert isinstance(fast, Timed)
    assert slow.note == {"kind": "sleeper"}
    assert len(slow.seconds) == 2
    assert fast.ratio(slow).median > 1.5
    assert found["raises"] == Absent("ValueError: invalid literal for int() with base 10: 'text'")
    assert found["dies"] == Absent("its process ended with 3")
    assert found["absent"] == Absent("not installed")


@pytest.mark.nightly
def test_an_engine_apart_may_have_several_cases() -> None:
    cases = {"short": Ready(partial(time.sleep, 0.01), {}), "long": Absent("too slow")}
    found = cases_apart({"one": partial(dict, cases)}, [*cases], Settings(rounds=2, threads=1), calls=1, together=False)
    assert isinstance(found["one"]["short"], Timed)
    assert found["one"]["long"] == Absent("too slow")


def test_plans_are_slower_where_both_speeds_are_steady() -> None:
    found: dict[str, Timed | Absent] = {"default": Timed((2.0,) * 8, {}), "layers only": Timed((2.0,) * 8, {})}
    assert slower(found) == ""
    assert slower(found | {"layers only": Timed((1.5,) * 8, {})}) == "0.75"
    assert slower(found | {"layers only": Timed((1.0, 1.9) * 4, {})}) == "not known"
    assert slower(found | {"layers only": Absent("raises")}) == "not known"


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    row = Row("label", (Measured.of([1.0, 2.0, 4.0]), Measured(3.0, "x"), Absent("not installed"), "text", 5))
    table = Table("title", tuple("abcdef"), (row,), "text before")
    results = Results("topic", (table,), {"threads": "2"}, {"on": "a day"})
    assert read(write(results, tmp_path)) == results
    assert read_all(["other", "topic"], tmp_path) == [results]
    assert "| label | 2.00 s (1.50 to 3.00) | 3.00 | *not installed* | text | 5 |" in page([results])


def test_the_page_is_that_of_the_files() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read_all(TOPICS))


@pytest.mark.parametrize(
    ("page", "written"), [(summary.PAGE, summary.with_numbers), (summary.ENCODERS, summary.with_encoders)]
)
def test_pages_have_the_numbers_of_the_files(page: Path, written: Callable[[str, list[Results]], str]) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == written(text, read_all(TOPICS))


def test_every_file_is_one_of_a_topic_measured_in_full() -> None:
    paths = sorted(path for path in FOLDER.glob("*.json") if path.stem != "zoo")  # which has a test of its own
    assert {path.stem for path in paths} <= set(TOPICS)
    for path in paths:
        results = read(path)
        assert results.topic == path.stem
        assert "quick" not in results.run
        assert results.tables


def test_facts_name_no_machine() -> None:
    facts = machine.facts(2)
    assert {"processor", "threads", "torch", "instructions"} <= set(facts)
    assert os.uname().nodename not in " ".join(facts.values())


def holding(mebibytes: int, working: int) -> Callable[[], object]:
    """Prepare a tensor, having held one of five times its size; the work makes another one."""
    before = torch.ones(5 * mebibytes * MEBIBYTE // 4)
    del before
    kept = torch.ones(mebibytes * MEBIBYTE // 4)

    def work() -> int:
        made = torch.ones(working * MEBIBYTE // 4)
        return int(made[0] + kept[0])

    return work


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="only Linux resets the highest value")
def test_peak_memory_is_that_of_the_work_and_of_what_it_was_prepared_with() -> None:
    peak = peak_of(holding, 40, 60, threads=1)
    assert peak.result == 2
    assert 0.9 * 100 * MEBIBYTE < peak.added < 1.3 * 100 * MEBIBYTE
    assert peak.before <= peak.highest


def run_suite(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the suite as `nox -s benchmarks` does."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(["tests", *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "benchmarks", "--quick", "--threads", "1", "--out", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


@pytest.mark.nightly
def test_the_suite_runs(tmp_path: Path) -> None:
    """Correctness, with a case of each family, writes a file that says that it was quick, and leaves the page alone."""
    before = PAGE.read_bytes()
    done = run_suite("correctness", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    results = read(tmp_path / "correctness.json")
    assert results.run["quick"] == "yes"
    assert "| all | 5 | 5 of 5 (" in done.stdout
    assert PAGE.read_bytes() == before


@pytest.mark.nightly
def test_plans_are_compared(tmp_path: Path) -> None:
    done = run_suite("plans", "--only", "three convolutions", "--rounds", "1", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    (table,) = read(tmp_path / "plans.json").tables
    assert [row.label for row in table.rows] == ["three convolutions"]
    ways = 1 + len(ways_of(fxopt.registry().pipelines()["cpu-inference"]))
    assert all(isinstance(cell, Measured) for cell in table.rows[0].cells[:ways]), table.rows[0]
