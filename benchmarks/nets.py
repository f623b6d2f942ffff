"""Models made of layers by name.

Annotations are evaluated here: torch cannot pickle a trace of a forward whose annotations are text.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

Flow = Callable[[Any, Tensor], Tensor]
"""How a tensor flows through a net, whose layers mypy does not know."""


class Net(nn.Module):
    """Layers by name, and how a tensor flows through them."""

    def __init__(self, flow: Flow, **layers: nn.Module) -> None:
        super().__init__()
        self.flow = flow
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, x: Tensor) -> Tensor:
        """Flow."""
        return self.flow(self, x)


class Nested(nn.Module):
    """A block with the layers inside."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: Tensor) -> Tensor:
        """The block."""
        result: Tensor = self.block(x)
        return result
