"""Checks of whether a rewrite may take a module apart, and how to build a module without initialising it."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from fxopt_core import is_plain_data, type_text


def tensor_problem(tensor: Tensor, *, parameter: bool) -> tuple[str, str] | None:
    """Return why a tensor may not be rewritten, as (reason, predicate), or None: only plain, dense tensors may be."""
    if parameter and type(tensor) is not nn.Parameter:
        return "not-a-parameter", f"is {type_text(tensor)}, not a plain torch.nn.Parameter"
    if type(tensor) not in (Tensor, nn.Parameter):
        return "not-a-parameter", f"is a tensor subclass, {type(tensor).__name__}"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return "not-a-parameter", "is sparse or quantized"
    strides = tensor.stride()
    if 0 in strides and any(stride == 0 and size > 1 for stride, size in zip(strides, tensor.shape, strict=True)):
        return "tied-parameter", "is expanded, so that its elements share memory"
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        return "hooks", "has hooks on its gradient"
    return None


def conv1d_class() -> type[nn.Module] | None:
    """Return ``Conv1D`` of transformers, a linear layer with transposed weight; None unless it was imported."""
    # Looked up and not imported, since importing transformers takes longer than a pass.
    cls = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return cls if isinstance(cls, type) and issubclass(cls, nn.Module) else None


def module_problem(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> tuple[str, str] | None:
    """Return why a module may not be rewritten, as (reason, predicate), or None: only exact, plain types may be."""
    cls, state = type(module), vars(module)
    # A parametrization changes the class and adds a child, so that most layers need no further look.
    may_be_parametrized = cls not in classes or module._modules or "parametrizations" in state
    if may_be_parametrized and torch.nn.utils.parametrize.is_parametrized(module):
        return "parametrized", "is parametrized"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return "lazy", f"is lazy ({cls.__name__}) and has no weights yet"
    if cls not in classes:
        return "subclass", f"is {type_text(module)}, a subclass of torch's own {classes[0].__name__} or its siblings"
    if "forward" in state:
        return "patched-forward", "has a forward of its own on the instance"
    hooks = [key for key in _HOOKS if state.get(key)]
    hooks += [key for key in state if key not in _MODULE_STATE and key.endswith(_HOOK_ENDINGS) and state[key]]
    return ("hooks", f"has hooks ({', '.join(hooks)})") if hooks else _state_problem(module)


_MODULE_STATE = frozenset(vars(nn.Module()))
_HOOK_ENDINGS = ("_hooks", "_hooks_with_kwargs")
_HOOKS = tuple(key for key in vars(nn.Module()) if key.endswith(_HOOK_ENDINGS))
_OWN_PARAMETERS = frozenset({"weight", "bias"})
_OWN_BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked"})


def _state_problem(module: nn.Module) -> tuple[str, str] | None:
    """Return what a module holds that its class does not have; fxopt's layer classes declare what they have."""
    own: frozenset[str] = getattr(type(module), "own_parameters", _OWN_PARAMETERS)
    own_buffers: frozenset[str] = getattr(type(module), "own_buffers", _OWN_BUFFERS)
    strange = [key for key in (*module._parameters, *module._buffers) if key not in own | own_buffers]
    misplaced = [key for key in module._buffers if key in own - own_buffers]
    misplaced += [key for key in module._parameters if key in own_buffers - own]
    if misplaced:
        kind = "parameter" if misplaced[0] in own else "buffer"
        return "not-a-parameter", f"has a `{misplaced[0]}` that is not a {kind}"
    if strange or module._modules:
        found = ", ".join(f"`{key}`" for key in (*strange, *module._modules))
        return "extra-state", f"holds {found}, which its class does not have"
    parameters = module._parameters
    for key, tensor in (*parameters.items(), *module._buffers.items()):
        problem = None if tensor is None else tensor_problem(tensor, parameter=key in parameters)
        if problem is not None:
            return problem[0], f"has a `{key}` that {problem[1]}"
    for key, value in plain_attributes(module):
        if not is_plain_data(tuple(value) if isinstance(value, list) else value):
            kind = type(value).__name__
            return "extra-state", f"holds an attribute `{key}` of type {kind}, which a rewrite would lose"
    return None


def plain_attributes(module: nn.Module) -> list[tuple[str, object]]:
    """Return the attributes of a module that are not torch's own state."""
    return [(key, value) for key, value in vars(module).items() if key not in _MODULE_STATE]


ModuleT = TypeVar("ModuleT", bound=nn.Module)


def bare_module(cls: type[ModuleT], *args: Any, **kwargs: Any) -> ModuleT:
    """Return a module whose tensors are on the meta device, to be assigned: nothing is allocated or drawn there.

    >>> bare_module(nn.Linear, 2, 3).weight
    Parameter containing:
    tensor(..., device='meta', size=(3, 2), requires_grad=True)
    """
    # Classes from elsewhere may do more in `reset_parameters`, or object to being subclassed.
    made: Any = cls
    if cls.__module__.startswith("torch.nn.modules."):
        made = _without_initialisation(made)
    module: ModuleT = made(*args, device="meta", **kwargs)
    module.__class__ = cls
    return module


@cache
def _without_initialisation(cls: Any) -> type[nn.Module]:
    # On the meta device, drawing values takes as long as all the rest.
    return type(cls.__name__, (cls,), {"reset_parameters": lambda self: None})


def module_with(parameters: Mapping[str, nn.Parameter], cls: type[ModuleT], *args: Any, **kwargs: Any) -> ModuleT:
    """Return a module of a class with these parameters by name; the others are on the meta device, to be assigned.

    >>> module_with({"bias": nn.Parameter(torch.ones(3))}, nn.Linear, 2, 3).bias
    Parameter containing:
    tensor([1., 1., 1.], requires_grad=True)
    """
    module = bare_module(cls, *args, **kwargs)
    for name, parameter in parameters.items():
        module.register_parameter(name, parameter)
    return module
