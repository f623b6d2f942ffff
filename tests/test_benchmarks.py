"""The suite of benchmarks: what it says of times, memory and peers is so; the pages are those of the files."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from benchmarks.page import PAGE, page, shown
from benchmarks.peak_memory import peak_of
from benchmarks.peers import peer
from benchmarks.results import FOLDER, Results, read, read_all, write
from benchmarks.suite import Absent, Measured, Row, Table, shuffled_once, shuffled_rounds, tried
from benchmarks.topics import TOPICS
from torch import nn

from benchmarks import machine, peak_memory, suite, summary

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


def test_each_round_has_every_task_once_in_an_order_of_its_own() -> None:
    calls: list[str] = []
    clock = Clock()

    def task(name: str) -> Callable[[], None]:
        def run() -> None:
            calls.append(name)
            clock.now += 1

        return run

    names = [f"task {number}" for number in range(6)]
    shuffled_rounds({name: task(name) for name in names}, 4, warm_up=1, clock=clock)
    rounds = [calls[start : start + 6] for start in range(6, len(calls), 6)]
    assert len(rounds) == 4
    assert all(sorted(each) == names for each in rounds)
    assert len({tuple(each) for each in rounds}) > 1


def test_what_runs_once_is_made_anew_and_its_making_is_not_measured() -> None:
    clock = Clock()
    made = []

    def make() -> Callable[[], None]:
        clock.now += 100
        made.append(1)
        return clock.task(2)

    assert shuffled_once({"one": make}, 3, clock=clock) == {"one": (2, 2, 2)}
    assert len(made) == 4


def test_tasks_run_without_gradients() -> None:
    enabled = []
    shuffled_rounds({"one": lambda: enabled.append(torch.is_grad_enabled())}, 1, clock=Clock(), sample_seconds=0)
    assert not any(enabled)


def test_what_raises_is_a_cell_with_the_reason() -> None:
    def make() -> Callable[[], object]:
        raise ValueError("no such layout\nand more")

    assert tried(make) == Absent("ValueError: no such layout")


def test_a_peer_that_is_missing_is_absent() -> None:
    assert peer("no_such_package_anywhere") == Absent("not installed")


def test_a_peer_that_does_not_import_says_with_what(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "broken_peer.py").write_text("import no_such_module_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    found = peer("broken_peer")
    assert isinstance(found, Absent)
    assert "does not import with transformers" in found.reason
    assert "no_such_module_anywhere" in found.reason


def test_a_row_has_a_cell_for_every_column() -> None:
    with pytest.raises(ValueError, match="has 2 cells, expected 3: a, b, c"):
        Table("title", ("a", "b", "c"), (Row("x", (1,)),))


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (Measured.of([0.001, 0.002, 0.003, 0.004, 0.005]), "3.00 ms (2.00 to 4.00)"),
        (Measured(0.25, "s"), "250 ms"),
        (Measured(2_340_000_000, "B"), "2.34 GB"),
        (Measured(1.0349, "x", 1.0, 1.1), "1.03 (1.00 to 1.10)"),
        (Measured(0.0, "s"), "0.00 µs"),
        (Absent("a | b"), "*a \\| b*"),
        (7, "7"),
        ("plain", "plain"),
    ],
    ids=str,
)
def test_cells_are_shown_in_units_that_people_read(cell: suite.Cell, text: str) -> None:
    assert shown(cell) == text


def test_results_come_back_from_their_file(tmp_path: Path) -> None:
    row = Row("label", (Measured.of([1.0, 2.0, 4.0]), Measured(3.0, "x"), Absent("not installed"), "text", 5))
    table = Table("title", tuple("abcdef"), (row,), "text before")
    results = Results("topic", (table,), {"threads": "2"}, {"on": "a day"})
    assert read(write(results, tmp_path)) == results
    assert read_all(["other", "topic"], tmp_path) == [results]
    assert "| label | 2.00 s (1.50 to 3.00) | 3.00 | *not installed* | text | 5 |" in page([results])


def test_the_page_is_that_of_the_files() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(read_all(TOPICS))


def test_the_comparison_has_the_numbers_of_the_files() -> None:
    text = summary.PAGE.read_text(encoding="utf-8")
    assert text == summary.with_numbers(text, read_all(TOPICS))


def test_the_readme_has_the_numbers_of_the_files() -> None:
    """A cell is a ratio to eager of the files, and an empty one was not measured."""
    table = (PAGE.parent.parent / "README.md").read_text(encoding="utf-8").split("## What it gains")[1].split("\n\n")[2]
    head, _, *rows = ([cell.strip(" *") for cell in line.split("|")[1:-1]] for line in table.splitlines())
    ways = {"": "", "`torch.compile`, freezing": "torch.compile, freezing", "fxopt": "fxopt, cpu-inference"}
    ways |= {"fxopt bfloat16": "fxopt, cpu-inference-bf16", "fxopt int8": "fxopt, cpu-inference-int8"}
    ways |= {"onnxruntime": "onnxruntime", "onnxruntime int8": "onnxruntime, int8"}
    ways |= {"OpenVINO": "OpenVINO", "OpenVINO bfloat16": "OpenVINO, bf16"}
    tables = {each.title: each for results in read_all(("cpu-inference", "encoders")) for each in results.tables}
    for label, *cells in rows:
        if "AVX2 alone" in label:  # measured once, on a machine that is no longer there
            continue
        name, size = label.split(", ")[:2]
        measured = tables.get(name) or tables[f"{name}, {size.removesuffix(' tokens')}"]
        speeds = {row.label: shown(row.cells[1]).partition(" ")[0] for row in measured.rows}
        assert cells == [speeds.get(ways[each], "") for each in head[1:]], label


def test_a_comparison_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="needs the lines"):
        summary.with_numbers("# Comparison\n", [])


def test_speeds_are_one_line_for_each_way_to_run_a_model() -> None:
    columns = ("", "one call", "times as fast as eager")
    rows = (Row("eager", (Measured(1.0), Measured(1.0, "x"))), Row("other", (Absent("no"), Absent("no"))))
    more = (Row("third", (Measured(1.0), Measured(2.5, "x", 2.0, 3.0))),)
    found = summary.speeds([Table("one", columns, rows), Table("two", columns, more)])
    assert found.columns == ("", "one", "two")
    cells = {row.label: row.cells for row in found.rows}
    assert cells == {"eager": (Measured(1.0, "x"), "-"), "other": ("-", "-"), "third": ("-", Measured(2.5, "x"))}


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


def failing() -> Callable[[], object]:
    """Prepare nothing."""
    raise LookupError("nothing to prepare")


def test_a_measurement_of_memory_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match="nothing to prepare"):
        peak_of(failing, threads=1)


def test_memory_is_readable_in_this_process() -> None:
    assert 0 < peak_memory.resident() <= 1.01 * peak_memory.highest_resident()


def run_suite(*arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Run the suite as `nox -s benchmarks` does."""
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(["tests", *filter(None, sys.path)]),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "benchmarks", "--quick", "--threads", "1", "--out", str(folder), *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_the_suite_runs(tmp_path: Path) -> None:
    """Correctness, with a case of each family, writes a file that says that it was quick, and leaves the page alone."""
    before = PAGE.read_bytes()
    done = run_suite("correctness", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    results = read(tmp_path / "correctness.json")
    assert results.run["quick"] == "yes"
    assert "| all | 5 | 5 of 5 (" in done.stdout
    assert PAGE.read_bytes() == before


def test_an_unknown_topic_is_refused_with_the_list(tmp_path: Path) -> None:
    done = run_suite("no-such-topic", folder=tmp_path)
    assert done.returncode == 2
    assert "no topic no-such-topic; there are correctness" in done.stderr


def test_seeds_decide_the_order() -> None:
    names = list("abcdefgh")
    orders = [list(suite._order(names, 2, seed)) for seed in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    random.seed(0)  # the order is no matter of the global state
    assert list(suite._order(names, 2, 0)) == orders[0]


def test_threads_are_set_for_torch_and_what_is_started() -> None:
    threads, variable = torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")
    try:
        suite.set_threads(1)
        assert torch.get_num_threads() == 1
        assert os.environ["OMP_NUM_THREADS"] == "1"
        nn.Linear(2, 2)(torch.ones(1, 2))
    finally:
        torch.set_num_threads(threads)
        if variable is None:
            del os.environ["OMP_NUM_THREADS"]
        else:
            os.environ["OMP_NUM_THREADS"] = variable
