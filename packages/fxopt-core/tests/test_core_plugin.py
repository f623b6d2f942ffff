"""What the registry gets from core itself: copies and checks, to be named in pipeline text."""

from __future__ import annotations

from importlib.metadata import entry_points

import pytest
import torch
from torch import nn
from torch.fx import GraphModule

from fxopt_core import (
    DeepCopy,
    LintAndRecompile,
    Registry,
    Transformation,
    TransformationsPlugin,
    __version__,
    compose,
    history,
    registry,
    undo,
)

PLUGIN: TransformationsPlugin = entry_points(group="fxopt")["core"].load()
PASSES: dict[str, type[Transformation]] = {"deep-copy": DeepCopy, "lint-and-recompile": LintAndRecompile}


@pytest.fixture
def passes() -> Registry:
    """A registry of core's passes alone."""
    made = Registry(entry_points=[])
    made.register(PLUGIN, name="core")
    return made


def traced() -> GraphModule:
    return torch.fx.symbolic_trace(nn.Sequential(nn.Linear(2, 2)))


@pytest.mark.parametrize("name", PASSES)
def test_the_process_knows_them(name: str) -> None:
    info = registry().available()[name]
    assert (info.family, info.distribution, info.version) == ("core", "fxopt-core", __version__)
    assert (info.reversible, info.preserves_computation, dict(info.options)) == (True, True, {})
    assert "->" in info.summary
    assert registry().create(name) == PASSES[name]()


@pytest.mark.parametrize(
    "text", ["deep-copy", "lint-and-recompile", "deep-copy,lint-and-recompile", "lint-and-recompile,deep-copy"]
)
def test_text_prints_back(passes: Registry, text: str) -> None:
    assert passes.pipeline_text(passes.pipeline(text)) == text
    assert passes.pipeline(text) == compose(*(PASSES[name]() for name in text.split(",")))


def test_a_pipeline_works_on_a_copy(passes: Registry) -> None:
    """What `compose(..., inplace=False)` does, and text has no other way to say."""
    given = traced()
    copied = passes.pipeline("deep-copy,lint-and-recompile")(given)
    assert copied is not given
    assert not history(given)
    assert [record.pass_name for record in history(copied)] == ["deep-copy", "lint-and-recompile"]
    assert copied.get_parameter("0.weight") is not given.get_parameter("0.weight")
    undo(copied)
    torch.testing.assert_close(copied(torch.ones(1, 2)), given(torch.ones(1, 2)))
