"""What other processes do with archives in the tests: run as ``python archives_elsewhere.py rewrite|check FOLDER``.

The folder holds ``plain.pt2``, which torch has exported and saved, and ``given.pt``: inputs, the model's outputs, the
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

FAMILIES = ("fxopt_linear", "fxopt_norm", "fxopt_arith", "fxopt_onednn", "fxopt_simplify", "fxopt_quantize")
FXOPT = ("fxopt", "fxopt_core", "fxopt_capture", *FAMILIES)


def tensors(output: Any) -> list[torch.Tensor]:
    """All tensors of an output."""
    return [leaf for leaf in torch.utils._pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)]


def compare(module: torch.nn.Module, given: Mapping[str, Any]) -> None:
    """Compare what a module computes with the model, at all sizes."""
    with torch.no_grad():
        for call, expected in zip(given["calls"], given["outputs"], strict=True):
            torch.testing.assert_close(tensors(module(**call, **given["fixed"])), expected, rtol=1e-4, atol=1e-4)


def rewrite(folder: Path, given: Mapping[str, Any]) -> None:
    """Load torch's archive, run the pipeline, save; print the counts of sites."""
    from fxopt_capture.archive.files import load, save
    from fxopt_core import history, registry

    loaded = load(folder / "plain.pt2")
    assert list(loaded.state_dict()) == given["keys"]
    compare(loaded, given)
    counts = []
    for name in given["pipeline"].split(","):
        loaded = registry().pipeline(name)(loaded)
        counts.append(len(history(loaded)[-1].rewrites))
    compare(loaded, given)
    save(loaded, folder / "rewritten.pt2")
    print(json.dumps(counts))


def check(folder: Path, given: Mapping[str, Any]) -> None:
    """Run what was saved with torch alone; then load it, and undo it to what torch's archive gives."""
    kept = {name: sys.modules.pop(name, None) for name in FXOPT}
    sys.modules.update(dict.fromkeys(FXOPT))  # type: ignore[arg-type]  # None makes an import fail
    for name in given["types"]:
        importlib.import_module(name)  # which registers the types of outputs with torch
    compare(torch.export.load(folder / "rewritten.pt2").module(), given)
    for name in kept:
        del sys.modules[name]
    from fxopt_capture.archive.files import load
    from fxopt_core import iter_nodes, undo

    loaded, plain = load(folder / "rewritten.pt2"), load(folder / "plain.pt2")
    compare(loaded, given)
    if given["reversible"]:
        undone = loaded
        for _ in given["pipeline"].split(","):  # each pass was a run of its own
            undone = undo(undone)
        rows = [[(n.op, n.name, str(n.target), str(n.args)) for n in iter_nodes(one.graph)] for one in (undone, plain)]
        assert rows[0] == rows[1]
        states = [one.state_dict() for one in (undone, plain)]
        assert list(states[0]) == list(states[1]) == given["keys"]
        assert all(torch.equal(value, states[1][key]) for key, value in states[0].items())
    print(json.dumps([]))


def main() -> None:
    """Do what the command line says."""
    what, folder = sys.argv[1], Path(sys.argv[2])
    given = torch.load(folder / "given.pt", weights_only=False)
    sys.modules.update(dict.fromkeys(given["absent"]))
    {"rewrite": rewrite, "check": check}[what](folder, given)


if __name__ == "__main__":
    main()
