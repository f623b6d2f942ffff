"""A model with regions, for tests of them."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_core import compose
from fxopt_cpu import FuseRegions, PackConvolutions, PackLinears
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import graph_of

X = (2, 3, 12, 10)


class Net(nn.Module):
    """Convolutions with what goes along and what does not, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, stride=2, padding=1)
        self.left = nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.right = nn.Conv2d(8, 8, 1)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> Tensor:
        """Return five numbers for each image."""
        y = F.relu6(self.stem(F.pad(x, (0, 1, 0, 1))))
        y = F.relu(self.right(F.silu(self.left(y))) + y)
        logits: Tensor = self.head(self.pool(y * 2).flatten(1))
        return logits


def prepared(model: nn.Module, *inputs: Tensor, form: Form = "modules") -> GraphModule:
    """Return a graph with packed layers and regions."""
    graph_module = compose(PackConvolutions(), PackLinears())(graph_of(model, form, *inputs))
    return FuseRegions()(graph_module)
