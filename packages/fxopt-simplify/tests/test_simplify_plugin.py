"""What the registry gets from this family."""

from __future__ import annotations

from fxopt_simplify import plugin


def test_the_pipeline_simplify_needs_no_other_family() -> None:
    own = {cls().name for cls in plugin.fxopt_transformations()}
    assert set(plugin.fxopt_pipelines()["simplify"].split(",")) <= own
