"""What the registry gets from this family."""

from __future__ import annotations

import torch

import fxopt_arith
from fxopt_arith import ChangeTrueDivToMulByInverse, plugin
from fxopt_core import registry


def test_the_plugin_offers_every_pass_of_the_package() -> None:
    assert {cls.__name__ for cls in plugin.fxopt_transformations()} == set(fxopt_arith.__all__)


def test_the_registry_knows_it() -> None:
    info = registry().available()["change-true-div-to-mul-by-inverse"]
    assert (info.distribution, info.version) == ("fxopt-arith", fxopt_arith.__version__)
    assert info.reversible
    assert info.preserves_computation
    assert "->" in info.summary
    assert registry().create(info.name) == ChangeTrueDivToMulByInverse()
    text = "change-true-div-to-mul-by-inverse"
    assert registry().pipeline_text(registry().pipeline(text)) == text


def test_a_pass_by_name_runs() -> None:
    graph_module = torch.fx.symbolic_trace(lambda x: x / 4)
    registry().pipeline("change-true-div-to-mul-by-inverse")(graph_module, expect=1)
    assert graph_module(torch.ones(())).item() == 0.25
