"""Rewritten models on several processes of gloo: sharded, trained, saved and loaded; live models that are sharded.

One server process imports torch and what the cases need, once; each process is a fork of it. A case that hangs ends
when gloo's timeout is over.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import time
from collections.abc import Sequence
from multiprocessing import forkserver
from pathlib import Path

import pytest
import torch.distributed

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("torch was built without gloo", allow_module_level=True)

JOBS = (
    (2, ("save", "save_later", "refuse_trained_stand_ins", "train", "states", "numbers", "failures_and_undo")),
    (4, ("save", "load")),
    (2, ("live_fully_sharded", "live_tensor_parallel")),
    (1, ("load_into_plain",)),
)
FOUND: dict[tuple[int, int], dict[str, str]] = {}
PRELOADED = ["distributed_cases", "fxopt_capture", "torch._dynamo.symbolic_convert"]
SECONDS = 60  # that a process waits for the others; four times that for all cases


def run(world: int, names: Sequence[str], folder: Path) -> dict[str, str]:
    """Run cases on some processes; return for each what went wrong, or nothing."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join(sys.path))  # the server imports before it is told sys.path
        forkserver.ensure_running()
    store = folder / f"store-{time.monotonic_ns()}"
    processes = [context.Process(target=work, args=(rank, world, names, folder, store)) for rank in range(world)]
    for process in processes:
        process.start()
    until = time.monotonic() + 4 * SECONDS
    for process in processes:
        process.join(max(0.0, until - time.monotonic()))
    for process in processes:
        if process.is_alive():
            process.kill()
            process.join()
    found: dict[str, str] = {}
    for rank in range(world):
        file = Path(f"{store}-{rank}.json")
        said = json.loads(file.read_text()) if file.exists() else {}
        for name in names:
            text = said.get(name, f"it did not end in {4 * SECONDS} s, or its process did")
            found[name] = found.get(name, "") + (f"process {rank} of {world}: {text}\n" if text else "")
    return found


def work(rank: int, world: int, names: Sequence[str], folder: Path, store: Path) -> None:
    """Run cases as one of the processes."""
    import distributed_cases  # which this process has already, and pytest does not need

    distributed_cases.work(rank, world, names, folder, store, SECONDS)


@pytest.mark.parametrize(
    ("job", "name"),
    [
        pytest.param(number, name, id=f"{JOBS[number][0]}-{name}")
        for number in range(len(JOBS))
        for name in JOBS[number][1]
    ],
)
def test_case(job: int, name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    if not FOUND:
        folder = tmp_path_factory.mktemp("processes")
        for number, (world, names) in enumerate(JOBS):
            FOUND[number, world] = run(world, names, Path(folder))
    text = FOUND[job, JOBS[job][0]][name]
    assert not text, text


@pytest.mark.nightly  # by day layers are made parallel by hand; all processes import transformers for this one
def test_a_plan_of_transformers(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    text = run(2, ["live_tensor_plan"], tmp_path)["live_tensor_plan"]
    assert not text, text
