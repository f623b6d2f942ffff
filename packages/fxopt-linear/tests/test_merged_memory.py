"""Merging and undoing leave no copy of a weight behind, and none waits for the garbage collector."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch._dynamo  # else the first pass does: a cycle then holds its frames, and their snapshot, until a collection
from site_passes import Computes
from torch import Tensor, nn
from torch.fx import symbolic_trace

from fxopt_core import DeepCopy, PostconditionError, compose, undo
from fxopt_linear import FuseBiasInLinear, MergeLinears, merge_linears
from fxopt_rewrite import LinearCall


def pair(size: int) -> Any:
    return Computes(lambda m, x: m.q(x) + m.k(x), q=nn.Linear(size, size), k=nn.Linear(size, size))


def elements_alive(least: int) -> int:
    """How many elements the tensors of at least that many have together, each memory counted once."""
    found: dict[int, int] = {}
    for item in gc.get_objects():
        if (
            type(item) in (Tensor, nn.Parameter)
            and not item.is_meta
            and item.layout is torch.strided
            and item.numel() >= least
        ):
            found[item.untyped_storage().data_ptr()] = item.untyped_storage().nbytes() // item.element_size()
    return sum(found.values())


@pytest.mark.parametrize("size", [16, 300])  # a large tensor is released by the transaction, a small one is not
@pytest.mark.parametrize("transformation", [MergeLinears(), FuseBiasInLinear()], ids=["merge", "fuse"])
def test_weights_are_there_once(transformation: MergeLinears | FuseBiasInLinear, size: int) -> None:
    gc.collect()
    before = elements_alive(size * size)
    graph_module = symbolic_trace(nn.Sequential(pair(size), pair(size)).eval())
    gc.collect()
    gc.disable()
    try:
        weights = 4 * size * size
        assert elements_alive(size * size) - before == weights
        transformation(graph_module)
        assert elements_alive(size * size) - before == sum(
            parameter.numel() for parameter in graph_module.parameters() if parameter.dim() == 2
        )
        undo(graph_module)
        assert elements_alive(size * size) - before == weights
    finally:
        gc.enable()


@pytest.mark.parametrize("rows", [1, 2])
def test_a_weight_is_gone_before_the_next_one_is_copied(monkeypatch: pytest.MonkeyPatch, rows: int) -> None:
    def several(m: Any, x: Tensor) -> Tensor:
        values = [x, x + 1][:rows]
        return torch.cat([layer(value) for value in values for layer in m.layers], -1)

    layers = nn.ModuleList([nn.Linear(300, size) for size in (300, 500, 400)])
    graph_module = symbolic_trace(Computes(several, layers=layers).eval())
    del layers
    originals = [weakref.ref(layer.weight) for layer in graph_module.get_submodule("layers").children()]
    gc.collect()
    alive: list[int] = []

    fill = merge_linears._fill

    def counting(merged: nn.Linear, call: LinearCall, start: int, size: int) -> None:
        alive.append(sum(original() is not None for original in originals))
        fill(merged, call, start, size)

    monkeypatch.setattr(merge_linears, "_fill", counting)
    gc.disable()
    try:
        MergeLinears()(graph_module, expect=1)
    finally:
        gc.enable()
    assert alive == [3, 2, 1]
    assert all(original() is None for original in originals)


@pytest.mark.parametrize("kept", [False, True], ids=["model-gone", "model-kept"])
@pytest.mark.parametrize("share_storage", [False, True])
def test_a_failed_run_leaves_the_callers_memory_and_strides(share_storage: bool, kept: bool) -> None:
    model = pair(300)
    model.q.weight = nn.Parameter(torch.randn(300, 300).t())
    earlier, strides, both = model.k.weight.data, model.q.weight.stride(), torch.randn(2, 300)
    model.q.bias.data, model.k.bias.data = both
    graph_module = symbolic_trace(model)
    model = model if kept else None
    with pytest.raises(PostconditionError, match="nothing was changed"):
        MergeLinears(share_storage=share_storage)(graph_module, expect=5)
    get = graph_module.get_parameter
    assert get("k.weight").data_ptr() == earlier.data_ptr()
    assert get("k.bias").data_ptr() == both[1].data_ptr()
    assert get("q.weight").stride() == strides
    assert undo(MergeLinears(share_storage=share_storage)(graph_module)).get_parameter("q.weight").stride() == strides


@pytest.mark.parametrize("size", [16, 300])
@pytest.mark.parametrize("transformation", [MergeLinears(), FuseBiasInLinear()], ids=["merge", "fuse"])
def test_what_inference_mode_brings_back_can_be_trained(
    transformation: MergeLinears | FuseBiasInLinear, size: int
) -> None:
    graph_module = symbolic_trace(pair(size).eval())
    gc.collect()
    with torch.inference_mode():
        with pytest.raises(PostconditionError):
            transformation(graph_module, expect=5)
        copied = compose(transformation, DeepCopy())(graph_module)
        for each in (copied, undo(transformation(graph_module))):
            assert not any(parameter.is_inference() for parameter in each.parameters())
