"""What the registry gets from core itself: copies and checks, to be named in pipeline text."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from fxopt_core import (
    DeepCopy,
    LintAndRecompile,
    Transformation,
    __version__,
    history,
    registry,
    undo,
)

PASSES: dict[str, type[Transformation]] = {"deep-copy": DeepCopy, "lint-and-recompile": LintAndRecompile}


@pytest.mark.parametrize("name", PASSES)
def test_the_process_knows_them(name: str) -> None:
    info = registry().available()[name]
    assert (info.family, info.distribution, info.version) == ("core", "fxopt-core", __version__)
    assert (info.reversible, info.preserves_computation, dict(info.options)) == (True, True, {})
    assert "->" in info.summary
    assert registry().create(name) == PASSES[name]()


def test_a_pipeline_works_on_a_copy() -> None:
    """What `compose(..., inplace=False)` does, and text has no other way to say."""
    given = torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))
    copied = registry().pipeline("deep-copy,lint-and-recompile")(given)
    assert copied is not given
    assert not history(given)
    assert [record.pass_name for record in history(copied)] == ["deep-copy", "lint-and-recompile"]
    assert copied.get_parameter("0.weight") is not given.get_parameter("0.weight")
    undo(copied)
    torch.testing.assert_close(copied(torch.ones(1, 2)), given(torch.ones(1, 2)))
