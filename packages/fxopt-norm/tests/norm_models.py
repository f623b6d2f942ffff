"""Small models with batch norm, and how they are made to differ from the identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import site_passes
from torch import Tensor, nn

from fxopt_testing.models.norm import randomised as drawn


def randomised(model: nn.Module) -> nn.Module:
    """Give all batch norms of a model statistics and parameters of their own; return the model in eval mode."""
    return drawn(model).eval()


class Computes(site_passes.Computes):
    """Modules by name, and what is done with them."""

    def __init__(self, forward: Callable[[Any, Tensor], Any], **modules: nn.Module) -> None:
        super().__init__(forward, **modules)
        randomised(self)


def chain(*modules: nn.Module) -> nn.Module:
    """Return modules one behind the other, in eval mode."""
    return randomised(nn.Sequential(*modules))
