"""What passes refuse models for, and what helps: functions that change a model of `reason_models`."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

Change = Callable[[Any], object]


def tie(model: Any) -> None:
    """Let two layers have one weight."""
    model.k.weight = model.q.weight


def untie(model: Any) -> None:
    """Give the second one a weight of its own."""
    model.k.weight = nn.Parameter(model.q.weight.detach().clone())


def weight_as_buffer(model: Any) -> None:
    """Keep a weight as a buffer."""
    weight = model.k.weight.detach()
    del model.k.weight
    model.k.register_buffer("weight", weight)


def weight_as_parameter(model: Any) -> None:
    """Register it as a parameter."""
    weight = model.k.weight
    del model.k.weight
    model.k.weight = nn.Parameter(weight)


def hook(model: Any) -> None:
    """Watch a layer."""
    model.handle = model.k.register_forward_hook(lambda *_: None)


def unhook(model: Any) -> None:
    """Stop watching it."""
    model.handle.remove()
    del model.handle


def watch_gradient(model: Any) -> None:
    """Watch a gradient."""
    model.handle = model.k.weight.register_hook(lambda gradient: gradient)


def set_to(attribute: str, value: object) -> Change:
    """Return what sets an attribute, by dotted name."""

    def change(model: Any) -> None:
        owner, _, name = attribute.rpartition(".")
        setattr(model.get_submodule(owner), name, value)

    return change


def without(attribute: str) -> Change:
    """Return what deletes an attribute, by dotted name."""

    def change(model: Any) -> None:
        owner, _, name = attribute.rpartition(".")
        delattr(model.get_submodule(owner), name)

    return change


def nearly_no_variance(model: Any) -> None:
    """Make the scale of a batch norm exceed half precision."""
    model.norm.running_var.fill_(0.0)
    model.norm.eps = 1e-12
    model.half()


def parametrized(model: Any) -> None:
    """Compute a weight by a parametrization."""
    parametrize.register_parametrization(model.k, "weight", nn.Identity())


def weight_normed(model: Any) -> None:
    """Compute a weight of its direction and its norm."""
    parametrizations.weight_norm(model.k)


def not_parametrized(model: Any) -> None:
    """Keep what it computed."""
    parametrize.remove_parametrizations(model.k, "weight")


def pruned(model: Any) -> None:
    """Prune a weight; torch does so by a hook."""
    prune.l1_unstructured(model.k, "weight", amount=2)  # type: ignore[no-untyped-call]  # so in torch


def pruned_for_good(model: Any) -> None:
    """Make the pruning permanent."""
    prune.remove(model.k, "weight")  # type: ignore[no-untyped-call]  # so in torch


def give_copy(model: Any) -> None:
    """Let the second call be one of another module."""
    model.again = copy.deepcopy(model.again)


def run_once(model: Any) -> None:
    """Let lazy layers get their weights."""
    model(torch.zeros(model.shape))


def freeze_one(model: Any) -> None:
    """Freeze one layer, and not the other."""
    next(model.children()).requires_grad_(False)


def double_bias(model: Any) -> None:
    """Let weight and bias differ."""
    model.k.bias = nn.Parameter(model.k.bias.detach().double())


def nothing(model: Any) -> None:
    """Leave a model as it is."""


def freeze_all(model: Any) -> None:
    """Freeze all of it."""
    model.requires_grad_(False)


def merge_adapter(model: Any) -> None:
    """Add an adapter to its base, and take it off."""
    adapted, layer = model.k, model.k.base_layer
    with torch.no_grad():
        layer.weight += adapted.lora_B["default"].weight @ adapted.lora_A["default"].weight
    model.k = layer


def without_weight(model: Any) -> None:
    """Give a layer the weight that rounding leaves as it is."""
    model.dense = nn.Linear(model.dense.in_features, model.dense.out_features).train(model.training)
    nn.init.zeros_(model.dense.weight)
