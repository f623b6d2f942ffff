"""Restoring the keys of a model in a graph module made by `torch.fx`, which drops what the graph does not read."""

from __future__ import annotations

from typing import TypeVar

from torch import nn

T = TypeVar("T")


def keep_keys(model: nn.Module, traced: nn.Module) -> None:
    """Give a traced module the ``state_dict`` of its model: the same keys in the same order, and no others.

    Parameters, buffers and modules that the graph does not read are added under their names; modules that are not
    torch's become plain ones. Buffers that the model does not save, and tensors that were plain attributes, are not
    saved.

    >>> import torch
    >>> model = nn.Sequential(nn.Linear(2, 2))
    >>> model.unused = nn.Parameter(torch.ones(1))
    >>> traced = torch.fx.symbolic_trace(model)
    >>> list(traced.state_dict())
    ['0.weight', '0.bias']
    >>> keep_keys(model, traced)
    >>> list(traced.state_dict())
    ['unused', '0.weight', '0.bias']
    """
    made: dict[int, nn.Module] = {}

    def complete(original: nn.Module, traced: nn.Module) -> nn.Module:
        """Complete one module, and those in it; modules that both have are complete."""
        made[id(original)] = traced
        if original is traced:
            return traced
        extra = traced._buffers.keys() - original._buffers.keys()
        _complete(traced._parameters, original._parameters)
        _complete(traced._buffers, original._buffers)
        traced._non_persistent_buffers_set |= original._non_persistent_buffers_set | extra
        children: dict[str, nn.Module | None] = {}
        for name, child in original._modules.items():
            children[name] = None if child is None else completed(child, traced._modules.get(name))
        others = {name: child for name, child in traced._modules.items() if name not in children}
        traced._modules.clear()
        traced._modules.update(children | others)
        return traced

    def completed(original: nn.Module, traced: nn.Module | None) -> nn.Module:
        if traced is None and id(original) in made:  # another name of it
            return made[id(original)]
        if traced is None:
            is_plain_leaf = type(original).__module__.startswith("torch.nn") and not original._modules
            traced = original if is_plain_leaf else nn.Module().train(original.training)
        return complete(original, traced)

    complete(model, traced)


def _complete(traced: dict[str, T], original: dict[str, T]) -> None:
    """Bring entries into the original's order and add missing ones; the others follow."""
    merged = {name: traced.get(name, tensor) for name, tensor in original.items()}
    merged.update((name, tensor) for name, tensor in traced.items() if name not in merged)
    traced.clear()
    traced.update(merged)
