"""What a module holds: whether a rewrite may take it apart, and what it takes to build it again."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn


def tensor_problem(tensor: Tensor, *, parameter: bool) -> str | None:
    """Say what is wrong with a tensor that is to be rewritten, or None: only plain, dense tensors are."""
    if parameter and type(tensor) is not nn.Parameter:
        return f"is a {type(tensor).__name__}, no plain torch.nn.Parameter"
    if type(tensor) not in (Tensor, nn.Parameter):
        return f"is a tensor subclass, {type(tensor).__name__}"
    if tensor.layout != torch.strided or tensor.is_quantized:
        return "is sparse or quantized"
    strides = tensor.stride()
    if 0 in strides and any(stride == 0 and size > 1 for stride, size in zip(strides, tensor.shape, strict=True)):
        return "is expanded, so that its elements share memory"
    if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
        return "has hooks on its gradient"
    return None


def tensor_reason(problem: str) -> str:
    """Return the reason code of what `tensor_problem` says."""
    if "expanded" in problem:
        return "tied-parameter"
    return "hooks" if "hooks" in problem else "not-a-parameter"


def conv1d_class() -> type[nn.Module] | None:
    """Return ``Conv1D`` of transformers, a linear layer with the weight transposed; None where it was not imported."""
    cls = getattr(sys.modules.get("transformers.pytorch_utils"), "Conv1D", None)
    return cls if isinstance(cls, type) and issubclass(cls, nn.Module) else None


def module_problem(module: nn.Module, classes: tuple[type[nn.Module], ...]) -> tuple[str, str] | None:
    """Say why a module may not be rewritten, as (reason, predicate), or None: only plain modules of exact types are."""
    cls, state = type(module), vars(module)
    may_be_parametrized = cls not in classes or module._modules or "parametrizations" in state
    if may_be_parametrized and torch.nn.utils.parametrize.is_parametrized(module):
        return "parametrized", "is parametrized"
    if isinstance(module, nn.modules.lazy.LazyModuleMixin):
        return "lazy", f"is lazy ({cls.__name__}) and has no weights yet"
    if cls not in classes:
        return "subclass", f"is a {cls.__name__}, a subclass of torch's own {classes[0].__name__} or its siblings"
    if "forward" in state:
        return "patched-forward", "has a forward of its own on the instance"
    hooks = [key for key in _HOOKS if state.get(key)]
    hooks += [key for key in state if key not in _MODULE_STATE and key.endswith(_HOOK_ENDINGS) and state[key]]
    if hooks:
        return "hooks", f"has hooks ({', '.join(hooks)})"
    return _state_problem(module)


_MODULE_STATE = frozenset(vars(nn.Module()))
_HOOK_ENDINGS = ("_hooks", "_hooks_with_kwargs")
_HOOKS = tuple(key for key in vars(nn.Module()) if key.endswith(_HOOK_ENDINGS))
_OWN_PARAMETERS = frozenset({"weight", "bias"})
_OWN_BUFFERS = frozenset({"running_mean", "running_var", "num_batches_tracked"})
_OWN = _OWN_PARAMETERS | _OWN_BUFFERS
_PLAIN_DATA = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device)


def is_plain_data(value: object) -> bool:
    """Return whether a value is immutable data that a record may hold."""
    if isinstance(value, tuple):
        return all(is_plain_data(item) for item in value)
    return isinstance(value, _PLAIN_DATA)


def _kind_of(key: str) -> str:
    return "parameter" if key in _OWN_PARAMETERS else "buffer"


def _state_problem(module: nn.Module) -> tuple[str, str] | None:
    strange = [key for key in (*module._parameters, *module._buffers) if key not in _OWN]
    misplaced = [key for key in module._buffers if key in _OWN_PARAMETERS]
    misplaced += [key for key in module._parameters if key in _OWN_BUFFERS]
    if misplaced:
        return "not-a-parameter", f"has a `{misplaced[0]}` that is no {_kind_of(misplaced[0])}"
    if strange or module._modules:
        found = ", ".join(f"`{key}`" for key in (*strange, *module._modules))
        return "extra-state", f"holds {found}, which its class does not have"
    parameters = module._parameters
    for key, tensor in (*parameters.items(), *module._buffers.items()):
        problem = None if tensor is None else tensor_problem(tensor, parameter=key in parameters)
        if problem is not None:
            return tensor_reason(problem), f"has a `{key}` that {problem}"
    for key, value in plain_attributes(module):
        if not is_plain_data(tuple(value) if isinstance(value, list) else value):
            return (
                "extra-state",
                f"holds an attribute `{key}` of type {type(value).__name__}, which a rewrite would lose",
            )
    return None


def plain_attributes(module: nn.Module) -> list[tuple[str, object]]:
    """Return the attributes of a module that are not torch's own state."""
    return [(key, value) for key, value in vars(module).items() if key not in _MODULE_STATE]


_BARE: dict[type[nn.Module], type[nn.Module]] = {}
_PATTERNS: dict[tuple[object, ...], nn.Module | None] = {}
_PATTERNS_KEPT = 256
ModuleT = TypeVar("ModuleT", bound=nn.Module)


def bare_module(cls: type[ModuleT], *args: Any, **kwargs: Any) -> ModuleT:
    """Return a module made without drawing random values for its tensors: they are on the meta device, to be assigned.

    >>> bare_module(nn.Linear, 2, 3).weight
    Parameter containing:
    tensor(..., device='meta', size=(3, 2), requires_grad=True)
    """
    return module_with({}, cls, *args, **kwargs)


def module_with(parameters: Mapping[str, nn.Parameter], cls: type[ModuleT], *args: Any, **kwargs: Any) -> ModuleT:
    """Return a module with these parameters, by name; those that are missing are on the meta device, to be assigned.

    Args:
        parameters: parameters that it has, too, when its class makes it.
        cls: its class.
        args: arguments for that.
        kwargs: keyword arguments for that.

    >>> module_with({"bias": nn.Parameter(torch.ones(3))}, nn.Linear, 2, 3).bias
    Parameter containing:
    tensor([1., 1., 1.], requires_grad=True)
    """
    key = _key_of(cls, args, kwargs)
    pattern = None if key is None else _PATTERNS.get(key)
    if pattern is None:
        pattern = _bare_module(cls, args, kwargs)
        if key is None or not _is_simple(pattern):
            for name, parameter in parameters.items():
                pattern.register_parameter(name, parameter)
            return pattern  # type: ignore[return-value]  # of this class
        if len(_PATTERNS) >= _PATTERNS_KEPT:
            _PATTERNS.clear()
        _PATTERNS[key] = pattern
    return _like(pattern, parameters)  # type: ignore[return-value]  # of this class


def _bare_module(cls: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> nn.Module:
    if cls not in _BARE:  # even on the meta device, initialising takes longer than all else about a module
        _BARE[cls] = type(cls.__name__, (cls,), {"reset_parameters": lambda self: None})
    module: nn.Module = _BARE[cls](*args, device="meta", **kwargs)
    module.__class__ = cls
    return module


def _key_of(cls: type[nn.Module], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, ...] | None:
    """Return what is equal for calls that make the same module; None where nothing tells."""
    given = (*args, *kwargs.values())
    if not all(map(is_plain_data, given)):
        return None
    return cls, given, tuple(kwargs), tuple(map(type, given)), torch.get_default_dtype()


def _is_simple(module: nn.Module) -> bool:
    """Return whether a module is plain data and parameters, so that a flat copy of it is one of its own."""
    simple = all(type(value) in _FLAT or is_plain_data(value) for value in vars(module).values())
    return simple and not module._modules and not module._buffers and vars(module).keys() >= _MODULE_STATE


_FLAT: dict[type, Any] = {dict: dict.copy, OrderedDict: OrderedDict.copy, set: set.copy, list: list.copy}


def _like(pattern: nn.Module, parameters: Mapping[str, nn.Parameter]) -> nn.Module:
    """Return a new module as a pattern is, which takes a fifth of the time of its constructor."""
    module = object.__new__(type(pattern))
    state = {key: _FLAT[type(value)](value) if type(value) in _FLAT else value for key, value in vars(pattern).items()}
    state["_parameters"] = {
        key: parameters[key] if key in parameters else value if value is None else _empty_like(value)
        for key, value in pattern._parameters.items()
    }
    object.__setattr__(module, "__dict__", state)
    return module


def _empty_like(value: nn.Parameter) -> nn.Parameter:
    empty = torch.empty(value.shape, dtype=value.dtype, device="meta")  # what ends in `_like` takes long on that device
    return nn.Parameter(empty, value.requires_grad)
