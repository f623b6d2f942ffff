"""Layers that are in no group: the refusal says which other layer keeps them out, and how."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from site_passes import Computes
from torch import Tensor, nn

from fxopt_linear import MergeLinears
from fxopt_testing.rewrites import refusals


def layers(forward: Callable[[Any, Tensor], Any], change: Callable[[Any], object] = lambda m: None) -> Computes:
    """Linear layers, called as a function says."""
    model = Computes(forward, **{name: nn.Linear(4, 4) for name in "qkv"}).eval()
    change(model)
    return model


def told(model: nn.Module, **options: Any) -> dict[str, tuple[str, str]]:
    """Return reason and message of what is refused, by site."""
    graph_module = MergeLinears(**options)(torch.fx.symbolic_trace(model))
    return {refusal.site: (refusal.reason, refusal.message) for refusal in refusals(graph_module)}


def both(m: Any, x: Tensor) -> Any:
    return m.q(x) * 2.0, m.k(x) * 2.0


DIFFERENCES: list[tuple[Callable[[Any], object], str, str]] = [
    (lambda m: m.k.double(), "dtype-mismatch", "`q` is torch.float32 on cpu, and `k` is torch.float64 on cpu"),
    (lambda m: m.k.to("meta"), "dtype-mismatch", "`q` is torch.float32 on cpu, and `k` is torch.float32 on meta"),
    (lambda m: m.k.train(), "mixed-mode", "`q` is in eval mode, and `k` is in train mode"),
    (lambda m: m.k.weight.requires_grad_(False), "mixed-requires-grad", "`q` is trainable, and `k` is frozen"),
    (
        lambda m: m.q.bias.requires_grad_(False),
        "mixed-requires-grad",
        "`q` has a frozen bias, and `k` has a trainable bias",
    ),
    (
        lambda m: setattr(m.k, "bias", nn.Parameter(m.k.bias.detach().half())),
        "dtype-mismatch",
        "`q` has a bias of torch.float32 on cpu, and `k` has a bias of torch.float16 on cpu",
    ),
    (
        lambda m: setattr(m.train().k, "bias", None),
        "training",
        "`q` has a bias, and `k` has no bias, and zeros in its place would be trained",
    ),
    (
        lambda m: setattr(m, "k", nn.Linear(3, 4).eval()),
        "size-mismatch",
        "`q` takes inputs of size 4, and `k` takes inputs of size 3",
    ),
]


@pytest.mark.parametrize(("change", "reason", "found"), DIFFERENCES, ids=[found for _, _, found in DIFFERENCES])
def test_in_what_two_layers_differ(change: Callable[[Any], object], reason: str, found: str) -> None:
    refused = told(layers(both, change))
    assert {site: reason for site, (reason, _) in refused.items()} == {"q": reason, "k": reason}
    assert refused["q"][1].endswith(found)
    for name in ("q", "k"):
        assert f"`{name}`" in refused["q"][1]
        assert f"`{name}`" in refused["k"][1]


def test_a_layer_without_bias_goes_to_the_first_that_it_fits() -> None:
    def change(m: Any) -> None:
        m.v.bias = None
        m.k.bias.requires_grad_(False)

    def forward(m: Any, x: Tensor) -> Any:
        return m.v(x) * 2.0, m.q(x) * 2.0, m.k(x) * 2.0

    refused = told(layers(forward, change))
    assert list(refused) == ["k"]
    assert refused["k"][0] == "mixed-requires-grad"
    assert refused["k"][1].endswith("since `k` has a frozen bias, and `q` has a trainable bias")


def test_a_layer_called_elsewhere_is_named() -> None:
    refused = told(layers(lambda m, x: (m.q(x) * 2.0, m.k(x) * 2.0, m.k(x + 1))))
    because = "1 of the 2 layers that a group needs, since"
    assert refused == {
        "q": ("group-too-small", f"linear `q`: {because} `k` is also called on other inputs"),
        "k": ("shared-module", f"linear `k`: {because} `k` is also called at node `k_1`, and `q` is not"),
    }


def test_a_neighbour_that_is_left_alone_is_named_with_its_reason() -> None:
    refused = told(layers(both), where="q")
    assert refused["k"] == ("filtered", "linear `k` does not match where='q'")
    assert refused["q"][0] == "group-too-small"
    assert refused["q"][1].endswith("since `k` on the same input is refused (filtered)")


def test_too_few() -> None:
    refused = told(layers(both), min_group=3)
    because = "since no other layer is called on `x`"
    message = f"linear `q`, `k`: 2 of the 3 layers that a group needs, {because}"
    assert refused == {"q": ("group-too-small", message)}
