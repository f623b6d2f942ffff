"""What folding costs, in steps: in proportion to the graph."""

from __future__ import annotations

import torch
from step_counts import count_steps
from torch import nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import history
from fxopt_norm import FuseBatchNorm2dInConv2d


def convolutions(count: int) -> GraphModule:
    layers: list[nn.Module] = []
    for _ in range(count):
        layers += [nn.Conv2d(2, 2, 1), nn.BatchNorm2d(2), nn.ReLU()]
    return symbolic_trace(nn.Sequential(*layers).eval())


def test_twice_the_graph_takes_twice_the_steps() -> None:
    def steps(count: int) -> int:
        graph_module = convolutions(count)
        found = count_steps(lambda: FuseBatchNorm2dInConv2d()(graph_module, lint_and_recompile=False))
        assert len(history(graph_module)[-1].rewrites) == count
        return found

    steps(4)  # what is looked up once
    assert steps(80) < 2.2 * steps(40)


def test_large_weights_are_scaled_block_by_block_to_the_same_values() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(128, 700, 3), nn.BatchNorm2d(700), nn.ConvTranspose2d(700, 64, 3), nn.BatchNorm2d(64)
    )
    for module in model:
        if isinstance(module, nn.BatchNorm2d):
            for values in (module.running_mean, module.running_var, module.weight, module.bias):
                assert values is not None
                values.data.uniform_(0.5, 1.5)
    convolution, norm = model[0], model[1]
    assert isinstance(convolution, nn.Conv2d)
    assert isinstance(norm, nn.BatchNorm2d)
    assert norm.running_var is not None
    for layout in (torch.contiguous_format, torch.channels_last):
        convolution.weight.data = convolution.weight.data.contiguous(memory_format=layout)
        graph_module = symbolic_trace(model.eval())
        factors = norm.weight.double() * torch.rsqrt(norm.running_var.double() + norm.eps)
        expected = (convolution.weight.double() * factors.reshape(-1, 1, 1, 1)).float()
        FuseBatchNorm2dInConv2d()(graph_module, expect=1)
        folded = graph_module.get_parameter("0_folded.weight")
        assert torch.equal(folded, expected)
        assert folded.stride() == convolution.weight.stride()
