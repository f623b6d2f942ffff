"""Passes inside of torch.compile, with all of inductor: it generates C++, and is skipped where nothing compiles it."""

from __future__ import annotations

import operator
import shutil
import warnings
from collections.abc import Iterator

import pytest
import torch
from nightly import mostly_nightly
from site_passes import Called
from torch.fx import GraphModule

from fxopt_arith import ChangeTrueDivToMulByInverse
from fxopt_compile import as_inductor_pass
from fxopt_core import Transformation, iter_nodes

pytestmark = pytest.mark.skipif(not (shutil.which("g++") or shutil.which("clang++")), reason="no compiler for C++")


class ChangeSubtrahend(Transformation):
    """``x - 1`` -> ``x - number``."""

    def __init__(self, *, number: float = 2.0) -> None:
        self.number = number

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in iter_nodes(graph_module.graph):
            if node.target in (operator.sub, torch.ops.aten.sub.Tensor):
                node.args = (node.args[0], self.number)
                self.mark_as_transformed(node)
        return graph_module


@pytest.fixture(autouse=True)
def _an_empty_cache() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of torch
        from torch._inductor import config
        from torch._inductor.utils import fresh_cache

        with fresh_cache(), config.patch({"cpp.vec_isa_ok": True}):  # else it compiles a program for each that it tries
            yield


def compiled(transformation: Transformation, place: str = "post_grad_custom_pre_pass") -> tuple[list[float], int]:
    """Return what the model gives when compiled with a pass, and how many sites the pass rewrote."""
    from torch._inductor import config

    torch._dynamo.reset()
    adapted = as_inductor_pass(transformation)
    with config.patch({place: adapted}):
        result = torch.compile(Called(lambda x: x / 4.0 - 1.0))(torch.full((2,), 8.0))
    return result.tolist(), sum(len(record.rewrites) for record in adapted.records)


@pytest.mark.parametrize(
    "place",
    mostly_nightly(
        ["joint_custom_pre_pass", "post_grad_custom_pre_pass", "post_grad_custom_post_pass"], ["joint_custom_pre_pass"]
    ),
)
def test_a_pass_of_a_family_at_places_that_know_dtypes(place: str) -> None:
    assert compiled(ChangeTrueDivToMulByInverse(), place) == ([1.0, 1.0], 1)


def test_equal_passes_share_the_cache_of_inductor_and_others_do_not() -> None:
    assert compiled(ChangeSubtrahend(number=3.0)) == ([-1.0, -1.0], 1)
    assert compiled(ChangeSubtrahend(number=3.0)) == ([-1.0, -1.0], 0)  # from the cache: nothing was left to run
    assert compiled(ChangeSubtrahend(number=4.0)) == ([-2.0, -2.0], 1)
