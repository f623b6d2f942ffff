"""Restoring the keys of a model in a graph module made by `torch.fx`, which drops what the graph does not read."""

from __future__ import annotations

from torch import nn

from fxopt_capture.graph.shells import owner_of, registered, shell_tree


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
    called = {id(module) for module in traced.modules()}
    shared = [module for module in list(model.modules())[1:] if id(module) in called or _is_leaf(module)]
    shell = shell_tree(model, shared, clone=lambda module: module)
    for name, buffer in traced.named_buffers(remove_duplicate=False):
        if registered(model, name) is None:
            owner, key = owner_of(shell, name)
            owner.register_buffer(key, buffer, persistent=False)
    for field in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set"):
        vars(traced)[field] = vars(shell)[field]


def _is_leaf(module: nn.Module) -> bool:
    return type(module).__module__.startswith("torch.nn") and not module._modules
