"""What a report says about the weights of a layer: shape, mean, spread and extent, and no values."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_core import iter_nodes

_LARGEST = 1 << 26  # elements: more would take longer than the drawing


def weights_of(graph_module: GraphModule) -> dict[str, str]:
    """Return a text for each module that a graph calls, and for each tensor that it reads, by target.

    >>> linear = nn.Linear(2, 2)
    >>> _ = linear.weight.data.copy_(torch.tensor([[1.0, -1.0], [3.0, 1.0]])), linear.bias.data.zero_()
    >>> print(weights_of(torch.fx.symbolic_trace(nn.Sequential(linear)))["0"])
    weight: float32[2, 2], mean 1, std 1.41, from -1 to 3
    bias: float32[2], mean 0, std 0, from 0 to 0
    """
    found: dict[str, str] = {}
    for node in iter_nodes(graph_module.graph):
        target = str(node.target)
        if node.op not in ("call_module", "get_attr") or target in found:
            continue
        lines = [_described(name, tensor) for name, tensor in _tensors(graph_module, target)]
        if lines:
            found[target] = "\n".join(lines)
    return found


def _tensors(graph_module: GraphModule, target: str) -> Iterator[tuple[str, Tensor]]:
    owner: object = graph_module
    for name in target.split("."):
        owner = getattr(owner, name, None)
    if isinstance(owner, Tensor):
        yield target.rpartition(".")[2], owner
    elif isinstance(owner, nn.Module):
        yield from owner.named_parameters(recurse=False)
        yield from owner.named_buffers(recurse=False)


@torch.no_grad()
def _described(name: str, tensor: Tensor) -> str:
    form = f"{name}: {str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided and not tensor.is_meta
    if not plain or not tensor.is_floating_point() or not 0 < tensor.numel() <= _LARGEST:
        return form
    values = tensor.float()
    std, mean = torch.std_mean(values, correction=0)
    low, high = values.aminmax()
    return f"{form}, mean {mean:.3g}, std {std:.3g}, from {low:.3g} to {high:.3g}"
