"""Another process, of other hashes, that knows fxopt from pickles alone: equal graphs and signatures, no plugin."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_pickling import structure, touched
from traced_blocks import functional

from fxopt_core import iter_nodes

SIGNED = """
import collections, enum, functools, math, operator, pathlib, torch
from fxopt_core import signature_of

value = {
    "words": {"one", "two", "three", "four", "five"}, "numbers": {1: 1.0, -1: -0.0, "nan": math.nan},
    "nested": [(1, "a", b"b", None), frozenset({"x", "y", ("z", 1)})],
    "torch": [torch.float16, torch.device("cuda:1"), torch.channels_last, torch.arange(6.0).reshape(2, 3).t()],
    "named": [operator.add, torch.relu, torch.nn.Linear, torch.ops.aten.add.Tensor],
}
print(signature_of(torch.nn.Linear, {"value": value}))
"""
READER = f"""
import sys
assert not any(name.startswith("fxopt") for name in sys.modules)
import pickle
for path in sys.argv[1:]:
    with open(path, "rb") as file:
        graph_module = pickle.load(file)
    import torch
    print([node.name for node in graph_module.graph.nodes])
    print(graph_module(torch.ones(2, 3))["b"].tolist())
    with open(path + ".again", "wb") as file:
        pickle.dump(graph_module, file)
from fxopt_core import registry
print(registry()._loaded, [m for m in sys.modules if m.startswith("fxopt_") and m.split(".")[0] != "fxopt_core"])
{SIGNED}
"""
NAMES = ("functional", "again")


@pytest.fixture(scope="module")
def originals() -> dict[str, Any]:
    return {name: touched(functional) for name in NAMES}


@pytest.fixture(scope="module")
def there(originals: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> tuple[list[str], Path]:
    """What the other process prints, and the folder of its pickles."""
    folder = tmp_path_factory.mktemp("pickles")
    for name, original in originals.items():
        (folder / name).write_bytes(pickle.dumps(original))
    seed = "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1"  # another one than here
    command, environment = [sys.executable, "-c", READER, *NAMES], {**os.environ, "PYTHONHASHSEED": seed}
    done = subprocess.run(
        command, env=environment, cwd=folder, stdout=subprocess.PIPE, text=True, check=True, timeout=120
    )
    return done.stdout.splitlines(), folder


def test_pickles_are_read_and_written(originals: dict[str, Any], there: tuple[list[str], Path]) -> None:
    lines, folder = iter(there[0]), there[1]
    for name, original in originals.items():
        assert next(lines) == str([node.name for node in iter_nodes(original.graph)])
        assert next(lines) == str(original(torch.ones(2, 3))["b"].tolist())
        assert structure(pickle.loads((folder / f"{name}.again").read_bytes())) == structure(original)


def test_neither_pickles_nor_importing_core_load_a_plugin(there: tuple[list[str], Path]) -> None:
    assert there[0][-2] == "None []"


def test_signatures_are_the_same(there: tuple[list[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    exec(SIGNED, {})
    assert [there[0][-1]] == capsys.readouterr().out.splitlines()
