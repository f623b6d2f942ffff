"""Changes that happen to models in practice, and that make an otherwise correct rewrite wrong."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune

from benchmarks.cases import Change


class OwnConvolution(nn.Conv2d):
    """A subclass that computes something else."""

    def forward(self, input: Tensor) -> Tensor:
        """Twice the convolution."""
        return 2 * super().forward(input)


class OwnLinear(nn.Linear):
    """A subclass that computes something else, as adapters do."""

    def forward(self, input: Tensor) -> Tensor:
        """Twice the layer."""
        return 2 * super().forward(input)


def double(module: nn.Module, args: object, output: Tensor) -> Tensor:
    """A hook that changes the output."""
    return 2 * output


def freeze(model: Any) -> None:
    """No parameter is trained."""
    model.requires_grad_(False)


def hook(name: str) -> Change:
    """A hook on a module doubles its output."""
    return lambda model: model.get_submodule(name).register_forward_hook(double)


def weight_norm(name: str) -> Change:
    """The weight is computed from its norm and direction."""
    return lambda model: parametrizations.weight_norm(model.get_submodule(name))


def pruned(name: str) -> Change:
    """Half of the weight is pruned, with a mask that stays."""
    prune_half: Any = prune.random_unstructured
    return lambda model: prune_half(model.get_submodule(name), "weight", amount=0.5)


def tied(one: str, two: str) -> Change:
    """Two modules have one weight."""

    def change(model: Any) -> None:
        model.get_submodule(two).weight = model.get_submodule(one).weight

    return change


def frozen(name: str) -> Change:
    """One module is not trained."""
    return lambda model: model.get_submodule(name).requires_grad_(False)


def evaluating(name: str) -> Change:
    """One module is in evaluation mode while the others train."""
    return lambda model: model.get_submodule(name).eval()


def statistics(variance: float, eps: float) -> Change:
    """The norm has this variance, and this eps."""

    def change(model: Any) -> None:
        with torch.no_grad():
            model.norm.running_var.fill_(variance)
        model.norm.eps = eps

    return change
