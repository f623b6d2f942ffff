"""Small models with batch norm, with random statistics that reveal every wrong fold."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm


def randomised(model: nn.Module) -> nn.Module:
    """Draw the statistics and parameters of all batch norms of a model."""
    # A new batch norm is nearly the identity, which would hide a wrong fold.
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, _BatchNorm):
                for tensor in (module.running_mean, module.bias):
                    if tensor is not None:
                        tensor.normal_()
                for tensor in (module.running_var, module.weight):
                    if tensor is not None:
                        tensor.uniform_(0.5, 2.0)
    return model


def chain(*modules: nn.Module) -> nn.Module:
    """Return modules in sequence."""
    return randomised(nn.Sequential(*modules))


class Convolution(nn.Module):
    """Batch norm after a convolution."""

    def __init__(self, *, statistics: bool = True) -> None:
        super().__init__()
        # No bias, so that a fold has to add one; and not the default `eps`, which a fold must not assume.
        self.conv = nn.Conv2d(2, 4, 3, padding=1, groups=2, bias=False)
        self.norm = nn.BatchNorm2d(4, eps=1e-3, track_running_stats=statistics)
        self.act, self.last = nn.ReLU(inplace=True), nn.Conv2d(4, 2, 1)
        self.last_norm = nn.BatchNorm2d(2)
        randomised(self)

    def forward(self, x: Tensor) -> Any:
        return self.last_norm(self.last(self.act(self.norm(self.conv(x)))))


class ReadsBetween(Convolution):
    """The result of the convolution is returned as well."""

    def forward(self, x: Tensor) -> Any:
        y = self.conv(x)
        return self.norm(y), y + 1.0


class SharedNorm(Convolution):
    """One batch norm after two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Conv2d(2, 4, 3, padding=1)

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.conv(x)), self.norm(self.again(x))


class FrozenNorm(Convolution):
    """The convolution trains and the batch norm does not; it is in eval mode, whatever the model is."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(False)

    def train(self, mode: bool = True) -> Any:
        """Leave the batch norms in eval mode."""
        super().train(mode)
        self.norm.eval()
        self.last_norm.eval()
        return self


def behind_linear() -> nn.Module:
    """Return batch norms after a layer and after an activation in place, and a layer after them."""
    return chain(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True), nn.BatchNorm1d(6), nn.Linear(6, 2))


def dropping() -> nn.Module:
    """Return dropout, and a batch norm in front of a layer."""
    return chain(nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Identity(), nn.Linear(4, 6), nn.BatchNorm1d(6))
