"""`read_layer_norm`: layer norms and RMS norms, alike in every form of graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from site_passes import exported
from torch import Tensor, nn

from fxopt_rewrite import GraphIndex, LayerNormCall, Obstacle, read_layer_norm

X = torch.arange(24.0).view(2, 3, 4)


class Called(nn.Module):
    """Calls a normalisation as a module, or a function of its parameters."""

    def __init__(self, norm: nn.Module, function: Callable[[Any, Tensor], Tensor] | None = None) -> None:
        super().__init__()
        self.norm, self.function = norm, function

    def forward(self, x: Tensor) -> Any:
        return self.norm(x) if self.function is None else self.function(self.norm, x)


def read(graph_module: torch.fx.GraphModule) -> list[LayerNormCall | Obstacle]:
    """Return what is read in a graph."""
    index = GraphIndex(graph_module)
    return [call for call in (read_layer_norm(index, node) for node in index.nodes) if call is not None]


def layer_norm(norm: Any, x: Tensor) -> Tensor:
    """Call a layer norm as a function."""
    return F.layer_norm(x, (4,), norm.weight, norm.bias, norm.eps)


def rms_norm(norm: Any, x: Tensor) -> Tensor:
    """Call an RMS norm as a function."""
    return F.rms_norm(x, (4,), weight=norm.weight, eps=norm.eps)


@pytest.mark.parametrize(
    ("make", "function", "centred"),
    [(lambda: nn.LayerNorm(4, eps=1e-3), layer_norm, True), (lambda: nn.RMSNorm(4, eps=1e-3), rms_norm, False)],
)
def test_a_norm_is_the_same_in_every_form(make: Callable[[], nn.Module], function: Any, centred: bool) -> None:
    norm = make().eval()
    forms = [torch.fx.symbolic_trace(Called(norm)), torch.fx.symbolic_trace(Called(norm, function).eval())]
    for graph_module in (*forms, exported(Called(norm).eval(), X)):
        (call,) = read(graph_module)
        assert isinstance(call, LayerNormCall)
        assert (call.label, call.normalized_shape, call.eps, call.centred) == ("norm", (4,), 1e-3, centred)
        assert call.weight is not None
        assert (call.weight.name, call.bias is not None) == ("norm.weight", centred)
        assert call.input.op == "placeholder"
        assert not call.training


def test_what_cannot_be_read_says_why() -> None:
    class Own(nn.LayerNorm):
        pass

    computed = Called(nn.LayerNorm(4), lambda n, x: F.layer_norm(x, (4,), n.weight * 2, n.bias))
    sized = Called(nn.LayerNorm(4), lambda n, x: F.layer_norm(x, (x.shape[-1],), n.weight, n.bias))
    decomposed = Called(nn.LayerNorm(4), lambda n, x: torch.native_layer_norm(x, (4,), n.weight, n.bias, 1e-5)[0])
    own = torch.fx.Tracer().trace(Called(nn.LayerNorm(4)))
    subclassed = torch.fx.GraphModule(Called(Own(4)), own)
    graphs = [*map(torch.fx.symbolic_trace, (computed, sized, decomposed)), subclassed]
    found = [call.reason for graph in graphs for call in read(graph) if isinstance(call, Obstacle)]
    assert found == ["computed-weight", "unsupported-call", "decomposed", "subclass"]


def test_a_norm_without_parameters_has_none() -> None:
    (call,) = read(torch.fx.symbolic_trace(nn.Sequential(nn.LayerNorm((3, 4), elementwise_affine=False))))
    assert isinstance(call, LayerNormCall)
    assert (call.tensors, call.normalized_shape) == ((), (3, 4))
