"""What the registry gets from this family."""

from __future__ import annotations

import re

from fxopt_cpu import plugin

PASSES = list(plugin.fxopt_transformations())


def test_the_pipelines_run_every_pass_after_those_that_prepare_for_them() -> None:
    own = {cls().name for cls in PASSES}
    prepare = "remove-no-ops fold-weights fuse-products fold-batch-norm simplify fuse-activations merge-linears"
    others = {*prepare.split(), "fuse-scaled-dot-product-attention"}
    for name, text in plugin.fxopt_pipelines().items():
        passes = re.sub(r"{.*?}", "", text).split(",")
        if name != "kernels":
            assert set(passes) == own | others
        assert passes.count("fuse-linears") == 1 + (name not in ("kernels", "cpu-inference")) + name.endswith("static")
