"""Rewritten models on several processes of gloo: sharded, trained, saved and loaded; live models that are sharded."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed

if not (torch.distributed.is_available() and torch.distributed.is_gloo_available()):
    pytest.skip("torch was built without gloo", allow_module_level=True)

import distributed_cases

JOBS = (
    (2, ("save", "save_later", "refuse_trained_stand_ins", "train", "states", "failures_and_undo")),
    (4, ("load", "save")),
    (2, ("load_nested", "live_fully_sharded", "live_tensor_parallel")),
    (1, ("load_into_plain", "load")),
)
FOUND: dict[tuple[int, int], dict[str, str]] = {}


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
            FOUND[number, world] = distributed_cases.run(world, list(names), Path(folder))
    text = FOUND[job, JOBS[job][0]][name]
    assert not text, text
