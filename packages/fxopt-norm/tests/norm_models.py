"""Small models with batch norm, and how they are made to differ from the identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from fxopt_testing.models.norm import randomised as drawn


def randomised(model: nn.Module) -> nn.Module:
    """Give all batch norms of a model statistics and parameters of their own; return the model in eval mode."""
    return drawn(model).eval()


class Computes(nn.Module):
    """Modules by name, and what is done with them."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **modules: nn.Module) -> None:
        super().__init__()
        for name, module in modules.items():
            setattr(self, name, module)
        self.computes = forward
        randomised(self)

    def forward(self, x: Tensor) -> Any:
        return self.computes(self, x)


def chain(*modules: nn.Module) -> nn.Module:
    """Return modules one behind the other, in eval mode."""
    return randomised(nn.Sequential(*modules))
