"""Models for pictures and reports, some with names that nobody should trust."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

HOSTILE = (
    "</script><script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "<!--",
    "]]>",
    "a`b${alert(1)}",
    'x"] --> y; click n0 "javascript:alert(1)"',
    "back\\slash\\",
    "right\u202eleft",
    "zero\x00byte",
    "line\u2028separator",
    "Größe-λ-模型-🙂",
)


class Small(nn.Module):
    """A convolution with batch norm, three linear layers of one input; one of them has a hook."""

    def __init__(self, hook: bool = True) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)
        self.q, self.k, self.v = nn.Linear(8, 8), nn.Linear(8, 4), nn.Linear(8, 4)
        if hook:
            self.v.register_forward_hook(_nothing)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv(x)).relu().mean((2, 3))
        return torch.cat([self.q(y), self.k(y), self.v(y)], -1)


def _nothing(*_: object) -> None:
    """Do nothing, as a hook."""


class Layers(nn.Module):
    """As many blocks as wanted, of about a dozen nodes each, with a value that all of them read."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(count))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        shared = mask.cos()
        for block in self.blocks:
            x = block(x, shared)
        return x


class Block(nn.Module):
    """Attention without its softmax, with a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 4)
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        y = self.norm(x)
        scores = self.q(y) * self.k(y) / 2.0 + mask
        attended: Tensor = self.out(scores.relu() * self.v(y))
        return x + attended


def traced(model: nn.Module) -> GraphModule:
    """The graph of a model in eval mode."""
    return torch.fx.symbolic_trace(model.eval())


def layers(nodes: int) -> GraphModule:
    """A graph of about so many nodes."""
    return traced(Layers(nodes // 12))


def hostile() -> GraphModule:
    """A graph module whose modules, arguments and traces say what nobody should trust; two of its layers may merge."""
    root = nn.Module()
    graph = torch.fx.Graph()
    x = value = graph.placeholder("x")
    for place, text in enumerate(HOSTILE):
        path = text.translate(dict.fromkeys(map(ord, '."\\\x00'), "_"))  # torch writes it into code
        root.add_module(f"{path}{place}", nn.Linear(4, 4))
        value = graph.call_module(f"{path}{place}", (value,))
        value.meta["stack_trace"] = f'File "/home/someone/{text}.py", line 3, in {text}\n    y = self["{text}"](x)'
        value = graph.call_function(nn.functional.pad, (value, (0, 0)), {"mode": text})
    for name in ("<b>one</b>", "<b>two</b>"):
        root.add_module(name, nn.Linear(4, 4))
    first, second = graph.call_module("<b>one</b>", (x,)), graph.call_module("<b>two</b>", (x,))
    graph.output((value, first, second))
    return GraphModule(root, graph)
