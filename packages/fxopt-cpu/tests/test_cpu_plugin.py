"""What the registry gets from this family."""

from __future__ import annotations

import re

import pytest

import fxopt_cpu
from fxopt_core import Transformation, registry
from fxopt_cpu import plugin

PASSES = list(plugin.fxopt_transformations())


def test_the_plugin_offers_every_pass_of_the_family() -> None:
    exported = [getattr(fxopt_cpu, name) for name in fxopt_cpu.__all__]
    assert set(PASSES) == {cls for cls in exported if isinstance(cls, type) and issubclass(cls, Transformation)}


@pytest.mark.parametrize("cls", PASSES)
def test_the_registry_knows_the_pass(cls: type[Transformation]) -> None:
    info = registry().available()[cls().name]
    assert info.distribution == "fxopt-cpu"
    assert "->" in info.summary
    assert registry().create(info.name) == cls()
    assert info.preserves_computation and info.reversible


def test_options_are_text() -> None:
    text = 'fuse-linears{weights="int8" keep=("lm_head",) keep-first=1}'
    transformation = registry().pipeline(text)
    assert transformation == fxopt_cpu.FuseLinears(weights="int8", keep=("lm_head",), keep_first=1)
    assert registry().pipeline_text(transformation) == text


def test_the_pipelines_run_every_pass_after_those_that_prepare_for_them() -> None:
    own = {cls().name for cls in PASSES}
    prepare = "remove-no-ops fold-weights fuse-products fold-batch-norm simplify fuse-activations merge-linears"
    others = {*prepare.split(), "fuse-scaled-dot-product-attention"}
    for name, text in plugin.fxopt_pipelines().items():
        passes = re.sub(r"{.*?}", "", text).split(",")
        if name != "kernels":
            assert set(passes) == own | others
        assert passes.count("fuse-linears") == (1 if name in ("kernels", "cpu-inference") else 2)
