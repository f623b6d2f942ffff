"""The functions and operators that an untrusted file may name: those that compute and do nothing else.

They are torch's, as listed here, and those that plugins offer in the hook ``fxopt_functions``.
"""

from __future__ import annotations

import builtins
import math
import operator
import re
import unicodedata
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule
from torch.overrides import get_overridable_functions

from fxopt_core import (
    OPERATORS,
    load_operator,
    name_of,
    registry,
)
from fxopt_core.errors import FxoptError
from fxopt_rewrite._torch import assert_is_none
from fxopt_rewrite.data.policies import Names, find, is_identifier
from fxopt_rewrite.plain_operators import is_plain_name, is_plain_operator


class UntrustedNameError(FxoptError):
    """A file names something that an untrusted file may not name."""


#: Functions that call others, or make functions that read attributes or call methods, by names that a file chooses;
#: and functions whose results outgrow memory for a few digits in a file.
_NOT_PLAIN = frozenset({"attrgetter", "call", "comb", "factorial", "itemgetter", "methodcaller", "perm", "prod"})
_BUILTINS = """
    abs all any bool complex divmod float getattr int isinstance len list max min pow range reversed round slice str sum
    tuple
"""
_FACTORIES = """
    arange as_tensor complex device empty empty_like empty_permuted empty_strided eye finfo full full_like iinfo
    is_floating_point linspace logspace meshgrid ones ones_like promote_types rand rand_like randint randint_like randn
    randn_like randperm result_type scalar_tensor tensor tril_indices triu_indices zeros zeros_like
    sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum
"""
_COMPOSED = """
    affine_grid cross_entropy dropout1d dropout2d dropout3d fold fractional_max_pool2d_with_indices
    fractional_max_pool3d_with_indices gaussian_nll_loss grid_sample gumbel_softmax interpolate local_response_norm
    lp_pool1d lp_pool2d lp_pool3d lu max_unpool1d multi_head_attention_forward multilabel_soft_margin_loss normalize
    softmin softsign tanhshrink unique unravel_index
"""
_METHODS = """
    bfloat16 bool byte cdouble cfloat char cpu cuda dim_order double float get_device half int is_inference long lu
    ndimension nelement short tolist unique
"""
_MODES = "_enter_autocast _exit_autocast"
_WORDS = {name.strip("_") for name in operator.__all__} - _NOT_PLAIN
_DUNDERS = {f"__{r}{name}__" for name in _WORDS for r in ("", "r")} | {"__bool__", "__float__", "__int__", "__len__"}
_PYTHON = frozenset((*_COMPOSED.split(), *_METHODS.split()))
_FIELDS = frozenset({"indices", "max", "min", "sign", "values"})  # of what torch returns, besides methods of tensors
#: Attributes of a graph module, for the first part of a path, and of modules, for the others: generated code would
#: find these instead.
_RESERVED = (frozenset(dir(GraphModule(nn.Module(), Graph()))), frozenset(dir(nn.Module())))
#: One part of a path. Generated code quotes it, so it has no quotes, backslashes or line ends.
_LOCAL = re.compile(r"\w[\w /:+@-]*")


def plain_name(function: object) -> str | None:
    """Return the name of a function if an untrusted file may name it, else None.

    >>> plain_name(torch.narrow), plain_name(operator.mul), plain_name(torch.ops.aten.add.Tensor), plain_name(eval)
    ('torch:narrow', '_operator:mul', 'torch:ops.aten.add.Tensor', None)
    """
    try:
        known = name_of(function) if is_plain_operator(function) else _plain_names().get(function)
    except TypeError:  # it is not hashable
        known = None
    if known is None and callable(function):
        name = name_of(function)
        # By identity, since a function of another module may have a name that a plugin offers.
        return name if name is not None and registry().functions().get(name) is function else None
    return known


def plain_function(name: object) -> Any:
    """Return the function or operator of this name, if `plain_name` names it; nothing is imported.

    >>> plain_function("math:sqrt")(4.0)
    2.0
    >>> plain_function("os:system")
    Traceback (most recent call last):
    fxopt_rewrite.plain_names.UntrustedNameError: found 'os:system', which is not a function of torch on ...
    """
    if isinstance(name, str) and name.startswith(OPERATORS):
        path = name.removeprefix(OPERATORS).split(".")
        operator = load_operator(*path) if len(path) > 1 and is_plain_name(path[1], path[0]) else None
        if operator is not None and is_plain_operator(operator):
            return operator
        return _offered(name, "not an operator that an untrusted file may call")
    if isinstance(name, str) and name in _plain_functions():
        return _plain_functions()[name]
    return _offered(name, "not a function of torch on tensors")


def _offered(name: object, otherwise: str) -> Any:
    found = registry().functions().get(name) if isinstance(name, str) else None
    if found is None:
        raise UntrustedNameError(f"found {name!r:.80}, which is {otherwise}, and no plugin offers it")
    return found


def torch_class(name: object) -> Any:
    """Return the loaded class of torch of this name, such as an enumeration; others raise an `UntrustedNameError`."""
    found = find(name) if isinstance(name, str) and name.startswith(("torch:", "torch.")) else None
    if not isinstance(found, type) or found.__module__.partition(".")[0] != "torch":
        raise UntrustedNameError(f"found {name!r:.60}, which is not a class of torch")
    return found


def is_plain_method(name: object) -> bool:
    """Return whether a node of an untrusted graph may call this method: it computes on tensors, or is an operator's.

    >>> is_plain_method("view"), is_plain_method("__add__"), is_plain_method("numpy"), is_plain_method("register_hook")
    (True, True, False, False)
    """
    if not isinstance(name, str):
        return False
    return name in _DUNDERS or (hasattr(Tensor, name) and _is_listed(name))


def is_plain_attribute(name: object) -> bool:
    """Return whether a node of an untrusted graph may read this attribute by ``getattr``: it is data, not a method.

    >>> is_plain_attribute("shape"), is_plain_attribute("numpy"), is_plain_attribute("__class__")
    (True, False, False)
    """
    if not isinstance(name, str) or not is_plain_identifier(name) or name.startswith("_"):
        return False
    return name in _FIELDS or not any(callable(getattr(holder, name, None)) for holder in (Tensor, GraphModule))


def is_plain_path(path: object) -> bool:
    """Return whether modules and tensors of an untrusted file may have this name.

    Generated code reads it as an attribute: a name must neither end a string in the code, nor be that of a method.

    >>> is_plain_path("encoder.0.weight"), is_plain_path('q", print(), "'), is_plain_path("to_folder")
    (True, False, False)
    """
    return isinstance(path, str) and all(
        _LOCAL.fullmatch(local) and not local.startswith("__") and local not in _RESERVED[index > 0]
        and unicodedata.normalize("NFKC", local) == local
        for index, local in enumerate(path.split("."))
    )  # fmt: skip


def is_plain_identifier(name: object) -> bool:
    """Return whether nodes and inputs of an untrusted file may have this name, which Python must not normalise."""
    return is_identifier(name) and unicodedata.normalize("NFKC", str(name)) == name


def _is_listed(name: str) -> bool:
    return not name.startswith("_") and (name in _PYTHON or is_plain_name(name))


@cache
def _plain_functions() -> Mapping[str, Any]:
    named = ((name_of(function), function) for function in _listed())
    return {name: function for name, function in named if name is not None}


@cache
def _plain_names() -> Mapping[object, str]:
    return {function: name for name, function in _plain_functions().items()}


def _listed() -> Iterator[Any]:
    public = (item for module in (operator, math) for item in vars(module).items() if item[0][0] != "_")
    yield from (each for name, each in public if callable(each) and name not in _NOT_PLAIN)
    yield from (getattr(builtins, name) for name in _BUILTINS.split())
    yield from (getattr(torch, name) for name in _FACTORIES.split())
    yield from (getattr(torch.amp.autocast_mode, name) for name in _MODES.split())
    yield from (torch._assert, assert_is_none)  # inserted by tracing
    yield torch._weight_norm  # what parametrizations call, in graphs of dynamo
    yield from (Tensor, type(None))
    for space, functions in get_overridable_functions().items():
        for function in functions:
            name = getattr(function, "__name__", "_")
            listed = is_plain_method(name) if space is Tensor else _is_listed(name)
            if listed and getattr(space, name, None) is function:
                yield function


#: The policy for data that anyone may have written.
PLAIN = Names(plain_function, torch_class, plain_name, is_plain_method, is_plain_attribute)
