"""What the registry gets from this family."""

from __future__ import annotations

import pytest

import fxopt_cpu
from fxopt_core import Transformation, registry
from fxopt_cpu import plugin

PASSES = list(plugin.fxopt_transformations())
APPROXIMATE = {"quantize-linears", "cast-to-bfloat16"}


def test_the_plugin_offers_every_pass_of_the_family() -> None:
    exported = [getattr(fxopt_cpu, name) for name in fxopt_cpu.__all__]
    assert set(PASSES) == {cls for cls in exported if isinstance(cls, type) and issubclass(cls, Transformation)}


@pytest.mark.parametrize("cls", PASSES)
def test_the_registry_knows_the_pass(cls: type[Transformation]) -> None:
    info = registry().available()[cls().name]
    assert info.distribution == "fxopt-cpu"
    assert "->" in info.summary
    assert registry().create(info.name) == cls()
    assert info.preserves_computation == info.reversible == (info.name not in APPROXIMATE)


def test_options_are_text() -> None:
    text = 'quantize-linears{keep=("lm_head",) keep-first=1}'
    transformation = registry().pipeline(text)
    assert transformation == fxopt_cpu.QuantizeLinears(keep=("lm_head",), keep_first=1)
    assert registry().pipeline_text(transformation) == text


def test_the_exact_pipeline_runs_every_exact_pass_after_those_that_prepare_for_them() -> None:
    pipelines = plugin.fxopt_pipelines()
    own = {cls().name for cls in PASSES} - APPROXIMATE
    names = {*pipelines["cpu-inference"].split(","), *pipelines["kernels"].split(",")}
    prepare = ["remove-no-ops", "fuse-products", "fold-batch-norm", "simplify", "fuse-activations", "merge-linears"]
    assert names - own == {"kernels", "fuse-scaled-dot-product-attention", *prepare}
    assert own <= names


@pytest.mark.parametrize("name", ["cpu-inference-int8", "cpu-inference-int8-static", "cpu-inference-bf16"])
def test_a_pipeline_merges_rounds_and_leaves_the_rest_to_the_exact_one(name: str) -> None:
    *own, last = plugin.fxopt_pipelines()[name].split(",")
    assert own[:3] == ["fuse-products", "fold-batch-norm", "merge-linears"]
    assert own[3].partition("{")[0] in APPROXIMATE
    assert last == "cpu-inference"
