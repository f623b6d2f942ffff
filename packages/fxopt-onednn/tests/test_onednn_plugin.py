"""What the registry gets from this family."""

from __future__ import annotations

import fxopt_onednn
from fxopt_core import ReversibleTransformation, Transformation, registry
from fxopt_onednn import plugin


def test_the_plugin_offers_every_pass_of_the_family() -> None:
    exported = [getattr(fxopt_onednn, name) for name in fxopt_onednn.__all__]
    passes = {cls for cls in exported if isinstance(cls, type) and issubclass(cls, Transformation)}
    assert set(plugin.fxopt_transformations()) == passes
    assert all(issubclass(cls, ReversibleTransformation) for cls in passes)


def test_the_registry_knows_the_family() -> None:
    for cls in plugin.fxopt_transformations():
        info = registry().available()[cls().name]
        assert info.distribution == "fxopt-onednn"
        assert info.preserves_computation
        assert info.reversible
        assert "->" in info.summary
        assert registry().create(info.name) == cls()


def test_the_pipeline_names_passes_of_this_family_and_of_those_that_prepare_for_them() -> None:
    names = plugin.fxopt_pipelines()["cpu-inference"].split(",")
    own = {cls().name for cls in plugin.fxopt_transformations()}
    assert set(names) - own - {"kernels", "plan-regions"} == {
        "remove-no-ops",
        "fuse-products",
        "fold-batch-norm",
        "simplify",
        "fuse-activations",
        "merge-linears",
    }
    assert own <= set(names)
