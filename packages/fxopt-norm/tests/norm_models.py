"""Small models with batch norm, and how they are made to differ from the identity."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def randomised(model: nn.Module) -> nn.Module:
    """Give all batch norms of a model statistics and parameters of their own; return the model in eval mode."""
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                for tensor in (module.running_mean, module.bias):
                    if tensor is not None:
                        tensor.normal_()
                for tensor in (module.running_var, module.weight):
                    if tensor is not None:
                        tensor.uniform_(0.5, 2.0)
    return model.eval()


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
