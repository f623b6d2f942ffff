"""What the registry gets from this family."""

from __future__ import annotations

import fxopt_simplify
from fxopt_core import ReversibleTransformation, Transformation, registry
from fxopt_simplify import plugin


def test_the_plugin_offers_every_pass_of_the_family() -> None:
    exported = [getattr(fxopt_simplify, name) for name in fxopt_simplify.__all__]
    passes = {cls for cls in exported if isinstance(cls, type) and issubclass(cls, Transformation)}
    assert set(plugin.fxopt_transformations()) == passes
    assert [cls for cls in passes if not issubclass(cls, ReversibleTransformation)] == [fxopt_simplify.FoldWeights]


def test_the_registry_knows_the_family() -> None:
    for cls in plugin.fxopt_transformations():
        info = registry().available()[cls().name]
        assert (info.distribution, info.version) == ("fxopt-simplify", fxopt_simplify.__version__)
        assert info.preserves_computation
        assert info.reversible == issubclass(cls, ReversibleTransformation)
        assert "->" in info.summary
        assert registry().create(info.name) == cls()


def test_the_pipeline_simplify_needs_no_other_family() -> None:
    own = {cls().name for cls in plugin.fxopt_transformations()}
    assert set(plugin.fxopt_pipelines()["simplify"].split(",")) <= own
