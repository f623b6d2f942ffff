"""What the registry gets from this family."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

import fxopt_linear
from fxopt_core import PassOptionError, registry
from fxopt_linear import FuseBiasInLinear, MergeLinears, plugin


def test_the_plugin_offers_every_pass_of_the_package() -> None:
    offered = {cls.__name__ for cls in plugin.fxopt_transformations()}
    assert offered == set(fxopt_linear.__all__) == {"MergeLinears", "FuseBiasInLinear"}


def test_the_registry_knows_them() -> None:
    available = registry().available()
    for name, cls in {"merge-linears": MergeLinears, "fuse-bias-in-linear": FuseBiasInLinear}.items():
        info = available[name]
        assert (info.distribution, info.version) == ("fxopt-linear", fxopt_linear.__version__)
        assert info.reversible
        assert info.preserves_computation
        assert isinstance(registry().create(name), cls)
        assert "->" in info.summary


def test_options_travel_as_text() -> None:
    text = 'merge-linears{min-group=3 where="layer.*"}'
    composition = registry().pipeline(text)
    assert registry().pipeline_text(composition) == text
    assert registry().create("merge-linears", min_group=3, where="layer.*") == MergeLinears(
        min_group=3, where="layer.*"
    )
    with pytest.raises((PassOptionError, ValueError)):
        registry().pipeline("merge-linears{min-group=1}")


def test_importing_the_plugin_does_not_import_the_passes() -> None:
    code = "import fxopt_linear.plugin, sys; print('fxopt_linear.plugin' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout == "True\n"


def test_a_pass_by_name_runs() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 2))
    graph_module = registry().create("fuse-bias-in-linear")(torch.fx.symbolic_trace(model), expect=1)
    torch.testing.assert_close(graph_module(torch.ones(1, 4)), model(torch.ones(1, 4)))
