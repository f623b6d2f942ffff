"""What the registry gets from this family."""

from __future__ import annotations

import pytest

import fxopt_quantize
from fxopt_core import Transformation, registry
from fxopt_quantize import plugin


def test_the_plugin_offers_every_pass_of_the_family() -> None:
    exported = [getattr(fxopt_quantize, name) for name in fxopt_quantize.__all__]
    passes = {cls for cls in exported if isinstance(cls, type) and issubclass(cls, Transformation)}
    assert set(plugin.fxopt_transformations()) == passes


def test_the_registry_says_that_they_approximate() -> None:
    for cls in plugin.fxopt_transformations():
        info = registry().available()[cls().name]
        assert info.distribution == "fxopt-quantize"
        assert not info.preserves_computation
        assert not info.reversible
        assert "->" in info.summary
        assert registry().create(info.name) == cls()


def test_options_are_text() -> None:
    text = 'quantize-linears{keep=("lm_head",) keep-first=1}'
    transformation = registry().pipeline(text)
    assert transformation == fxopt_quantize.QuantizeLinears(keep=("lm_head",), keep_first=1)
    assert registry().pipeline_text(transformation) == text


@pytest.mark.parametrize("name", ["cpu-inference-int8", "cpu-inference-int8-static", "cpu-inference-bf16"])
def test_a_pipeline_merges_rounds_and_leaves_the_rest_to_the_exact_one(name: str) -> None:
    *own, last = plugin.fxopt_pipelines()[name].split(",")
    assert own[:3] == ["fuse-products", "fold-batch-norm", "merge-linears"]
    assert own[3].partition("{")[0] in {cls().name for cls in plugin.fxopt_transformations()}
    assert last == "cpu-inference"
