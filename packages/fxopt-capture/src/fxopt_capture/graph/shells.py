"""A tree of fresh modules that hold a model's own parameters and buffers under their own names."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any, TypeVar

import torch
from torch import nn
from torch.fx import Node

M = TypeVar("M", bound=nn.Module)


def shell_tree(
    model: nn.Module, kept: Collection[nn.Module], clone: Callable[[nn.Module], nn.Module] | None = None
) -> nn.Module:
    """Return a tree with the names, tensors, ties and flags of `model` that shares no module with it.

    Modules in `kept` become shallow clones of their class, or what `clone` returns, all others plain ``nn.Module``. A
    module that the model holds under two names is one module under two names here too, so that ``state_dict`` has the
    same keys in the same order, including those of ties and of unused parameters.
    """
    cloned = {id(module) for module in kept}
    made: dict[int, nn.Module] = {}

    def shell(module: nn.Module) -> nn.Module:
        if id(module) in made:
            return made[id(module)]
        if id(module) in cloned:
            return made.setdefault(id(module), (clone or clone_module)(module))
        plain = made[id(module)] = nn.Module()
        plain.training = module.training
        plain._parameters.update(module._parameters)
        plain._buffers.update(module._buffers)
        plain._non_persistent_buffers_set |= module._non_persistent_buffers_set
        for name, child in module._modules.items():
            plain._modules[name] = None if child is None else shell(child)
        return plain

    return shell(model)


def clone_module(module: M) -> M:
    """Return a module of the same class with the very same parameters, buffers and children, and its own dictionaries.

    >>> linear = nn.Linear(2, 2)
    >>> clone = clone_module(linear)
    >>> clone.weight is linear.weight
    True
    >>> del clone.weight
    >>> linear.weight is None
    False
    """
    clone = type(module).__new__(type(module))
    for name, value in vars(module).items():
        vars(clone)[name] = value.copy() if isinstance(value, dict | set) else value
    return clone


def attribute(root: nn.Module, target: str) -> Any:
    """Return the attribute of a dotted name, or None."""
    found: Any = root
    for name in target.split("."):
        child = found._modules.get(name) if isinstance(found, nn.Module) else None  # asking the module takes longer
        found = getattr(found, name, None) if child is None else child
        if found is None:
            return None
    return found


def registered(root: nn.Module, target: str) -> torch.Tensor | None:
    """Return the parameter or buffer of a dotted name, or None."""
    path, _, name = target.rpartition(".")
    owner = attribute(root, path) if path else root
    return owner._parameters.get(name, owner._buffers.get(name)) if isinstance(owner, nn.Module) else None


def owner_of(root: nn.Module, target: str) -> tuple[nn.Module, str]:
    """Return the module that is to hold a dotted name, and the name's last part; missing containers are made."""
    *path, name = target.split(".")
    owner = root
    for part in path:
        child = owner._modules.get(part)
        if child is None:
            child = owner._modules[part] = nn.Module().train(root.training)
        owner = child
    return owner, name


def value_of(root: nn.Module, argument: object) -> Any:
    """Return the attribute that a ``get_attr`` argument reads from the graph's module; any other argument as it is."""
    is_read = isinstance(argument, Node) and argument.op == "get_attr"
    return attribute(root, str(argument.target)) if isinstance(argument, Node) and is_read else argument
