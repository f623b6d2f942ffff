"""A model with regions, for tests of them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_cpu import FuseConvolutions, FuseRegions
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import graph_of

X = (2, 3, 12, 10)


class Net(nn.Module):
    """Convolutions with what goes along and what does not."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.left = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.right = nn.Conv2d(8, 8, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Conv2d(8, 5, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Return five numbers for each image."""
        y = F.relu6(self.stem(F.pad(x, (0, 1, 0, 1))))
        y = F.relu(self.right(F.silu(self.left(y))) + y)
        logits: Tensor = self.head(self.pool(y * 2)).flatten(1)
        return logits


def prepared(model: nn.Module, *inputs: Tensor, form: Form = "modules") -> GraphModule:
    """Return a graph with packed layers and regions."""
    return FuseRegions()(FuseConvolutions()(graph_of(model, form, *inputs)))
