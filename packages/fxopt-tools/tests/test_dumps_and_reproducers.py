"""`Dumps` shows each pass, and a reproducer runs a failed one again."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from planted import AddToSub, MulToDiv, steps

from fxopt_core import LintAndRecompile, PassError, PreconditionError, VerificationError, compose, instrumented
from fxopt_tools import Dumps, reproduce, verify, write_reproducer

X = torch.ones(2)


def test_dumps_show_what_passes_change(tmp_path: Path) -> None:
    dumps = Dumps(tmp_path / "dumps")
    with instrumented(dumps):
        compose(LintAndRecompile(), AddToSub(), MulToDiv())(steps(1))
    names = [f"{name}.{when}.txt" for name in ("001_add-to-sub", "002_mul-to-div") for when in ("before", "after")]
    assert [path.name for path in dumps.files] == names
    assert {path.name for path in dumps.directory.iterdir()} == {*names}
    before, after = (path.read_text() for path in dumps.files[:2])
    assert "operator.add" in before and "operator.sub" in after and "operator.add" not in after
    with pytest.raises(PreconditionError, match="holds files"):
        Dumps(tmp_path / "dumps")


def test_dumps_show_the_state_at_a_failure(tmp_path: Path) -> None:
    dumps = Dumps(tmp_path)
    with instrumented(dumps), pytest.raises(PassError):
        AddToSub(raises_at="match")(steps(1))
    assert dumps.files[1].name == "000_add-to-sub.failed.txt"
    assert dumps.files[1].read_text().startswith("ValueError: ")


def test_a_reproducer_fails_again(tmp_path: Path) -> None:
    graph_module, passes = steps(2), compose(LintAndRecompile(), AddToSub(wrong_at="add"))
    path = write_reproducer(tmp_path / "failed.pt", graph_module, passes, X)
    with pytest.raises(VerificationError, match="pass `add-to-sub` changed"):
        reproduce(path)
    assert verify(graph_module, reproduce(path, pipeline="lint-and-recompile"), X)
    assert torch.load(write_reproducer(path, graph_module, LintAndRecompile()), weights_only=False)[1:] == (
        None,
        "lint-and-recompile",
    )
    reproduce(path)


def test_what_is_no_reproducer_is_refused(tmp_path: Path) -> None:
    torch.save(X, tmp_path / "x.pt")
    with pytest.raises(PreconditionError, match="is not a reproducer"):
        reproduce(tmp_path / "x.pt")
    with pytest.raises(PreconditionError, match="cannot be written"):
        write_reproducer(tmp_path / "nowhere" / "x.pt", steps(1), AddToSub(wrong_at="add"))
