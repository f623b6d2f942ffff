"""What other processes do with archives in the tests: run as ``python archives_elsewhere.py rewrite|check FOLDER``.

The folder holds ``plain.pt2``, which torch has exported and saved, and ``told.pt``: inputs, the model's outputs, the
names of modules that the process must not import, and a pipeline.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

FXOPT = ("fxopt", "fxopt_core", "fxopt_capture", "fxopt_linear", "fxopt_norm", "fxopt_arith", "fxopt_onednn")


def tensors(output: Any) -> list[torch.Tensor]:
    """All tensors of an output."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def compare(module: torch.nn.Module, told: Mapping[str, Any]) -> None:
    """Compare what a module computes with the model, at all sizes."""
    with torch.no_grad():
        for call, expected in zip(told["calls"], told["outputs"], strict=True):
            torch.testing.assert_close(tensors(module(**call, **told["fixed"])), expected, rtol=1e-4, atol=1e-4)


def rewrite(folder: Path, told: Mapping[str, Any]) -> None:
    """Load torch's archive, run the pipeline, save; print the counts of sites."""
    from fxopt_capture.archive import load, save
    from fxopt_core import history, registry

    loaded = load(folder / "plain.pt2")
    assert list(loaded.state_dict()) == told["keys"]
    compare(loaded, told)
    counts = []
    for name in told["pipeline"].split(","):
        loaded = registry().pipeline(name)(loaded)
        counts.append(len(history(loaded)[-1].rewrites))
    compare(loaded, told)
    save(loaded, folder / "rewritten.pt2")
    print(json.dumps(counts))


def check(folder: Path, told: Mapping[str, Any]) -> None:
    """Run what was saved with torch alone; then load it, and undo it to what torch's archive gives."""
    kept = {name: sys.modules.pop(name, None) for name in FXOPT}
    sys.modules.update(dict.fromkeys(FXOPT))  # type: ignore[arg-type]  # None makes an import fail
    for name in told["types"]:
        importlib.import_module(name)  # which tells torch of the types of outputs
    compare(torch.export.load(folder / "rewritten.pt2").module(), told)
    for name in kept:
        del sys.modules[name]
    from fxopt_capture.archive import load
    from fxopt_core import iter_nodes, undo

    loaded, plain = load(folder / "rewritten.pt2"), load(folder / "plain.pt2")
    compare(loaded, told)
    if told["reversible"]:
        undone = loaded
        for _ in told["pipeline"].split(","):  # each pass was a run of its own
            undone = undo(undone)
        rows = [[(n.op, n.name, str(n.target), str(n.args)) for n in iter_nodes(one.graph)] for one in (undone, plain)]
        assert rows[0] == rows[1]
        states = [one.state_dict() for one in (undone, plain)]
        assert list(states[0]) == list(states[1]) == told["keys"]
        assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    print(json.dumps([]))


def main() -> None:
    """Do what the command line says."""
    what, folder = sys.argv[1], Path(sys.argv[2])
    told = torch.load(folder / "told.pt", weights_only=False)
    sys.modules.update(dict.fromkeys(told["absent"]))
    {"rewrite": rewrite, "check": check}[what](folder, told)


if __name__ == "__main__":
    main()
