"""What the nodes of an archived graph may call, by name: arithmetic and torch's own functions on tensors.

An archive is read from a file that anyone may have written. So names are looked up in a table of functions that compute
something and do nothing else, and in torch's registry of operators, which torch's own reader of archives takes too;
nothing is imported. What cannot be named in this way cannot be archived.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import torch
from torch._ops import HigherOrderOperator, OpOverload, OpOverloadPacket
from torch.overrides import get_overridable_functions

from fxopt_core.errors import FxoptError
from fxopt_core.references import load_operator

_OPERATORS = """
    abs add and_ concat contains countOf delitem eq floordiv ge getitem gt iadd iand iconcat ifloordiv ilshift imatmul
    imod imul index indexOf inv invert ior ipow irshift is_ is_not isub itruediv ixor le lshift lt matmul mod mul ne neg
    not_ or_ pos pow rshift setitem sub truediv truth xor
"""
_BUILTINS = """
    abs all any bool complex divmod float getattr int isinstance len list max min pow range reversed round slice str sum
    tuple
"""
_FACTORIES = """
    arange as_tensor complex device empty empty_like empty_permuted empty_strided eye finfo full full_like iinfo
    is_floating_point linspace logspace meshgrid ones ones_like promote_types rand rand_like randint randint_like randn
    randn_like randperm result_type scalar_tensor tensor tril_indices triu_indices zeros zeros_like
"""
_SYMBOLIC = "sym_float sym_int sym_ite sym_max sym_min sym_not sym_sqrt sym_sum"
_MODES = "_enter_autocast _exit_autocast"
_OPERATOR_METHODS = """
    abs add and bool contains eq float floordiv ge getitem gt iadd iand ifloordiv imul index int invert ior isub
    itruediv le len lshift lt matmul mod mul ne neg or pos pow radd rand rfloordiv rmatmul rmul ror rpow rshift rsub
    rtruediv rxor setitem sub truediv xor
"""
_DUNDERS = frozenset(f"__{name}__" for name in _OPERATOR_METHODS.split())
_OPS = "torch.ops."


def target_name(target: object) -> str | None:
    """Return the name of what a node calls, or None where an archive does not name it.

    >>> target_name(torch.ops.aten.add.Tensor), target_name(torch.narrow), target_name(operator.mul), target_name(eval)
    ('torch.ops.aten.add.Tensor', 'torch.narrow', 'operator.mul', None)
    """
    if isinstance(target, OpOverload):
        return f"{_OPS}{target.namespace}.{target._opname}.{target._overloadname}"
    if isinstance(target, OpOverloadPacket):
        return f"{_OPS}{target._qualified_op_name.replace('::', '.')}"
    if isinstance(target, HigherOrderOperator):
        return f"{_OPS}higher_order.{target.__name__}"
    try:
        return _names().get(target)
    except TypeError:  # it is not hashable
        return None


def target_of(name: object) -> Any:
    """Return what has this name.

    Raises:
        ValueError: nothing that an archive may call has it.

    >>> target_of("math.sqrt")(4.0)
    2.0
    >>> target_of("os.system")
    Traceback (most recent call last):
    ValueError: a node calls 'os.system', which is no function of torch or operator that an archive may call
    """
    if isinstance(name, str) and name.startswith(_OPS):
        return _operator(name)
    if not isinstance(name, str) or name not in _functions():
        raise ValueError(f"a node calls {name!r}, which is no function of torch or operator that an archive may call")
    return _functions()[name]


def _operator(name: str) -> object:
    try:
        found = load_operator(*name.removeprefix(_OPS).split("."))
    except FxoptError as error:
        raise ValueError(
            f"a node calls operator {name}, which is not registered here; import the package that registers it first"
        ) from error
    if not isinstance(found, OpOverload | OpOverloadPacket | HigherOrderOperator):
        raise ValueError(f"a node calls {name!r}, which is no operator")
    return found


def is_method(name: object) -> bool:
    """Whether a node of an archive may call this method: a public one of tensors, or an operator's.

    >>> is_method("view"), is_method("__add__"), is_method("__reduce_ex__"), is_method("system")
    (True, True, False, False)
    """
    if not isinstance(name, str) or not name.isidentifier():
        return False
    return name in _DUNDERS or (not name.startswith("_") and hasattr(torch.Tensor, name))


def is_attribute(name: object) -> bool:
    """Whether a node of an archive may read this attribute by ``getattr``."""
    return isinstance(name, str) and name.isidentifier() and not name.startswith("_")


@cache
def _functions() -> Mapping[str, Any]:
    return dict(_listed())


@cache
def _names() -> Mapping[object, str]:
    names: dict[object, str] = {}
    for name, function in _functions().items():
        names.setdefault(function, name)
    return names


def _listed() -> Iterator[tuple[str, Any]]:
    """Yield names and functions; of several names of one function the first is its own."""
    yield from ((f"operator.{name}", getattr(operator, name)) for name in _OPERATORS.split())
    yield from ((f"builtins.{name}", getattr(builtins, name)) for name in _BUILTINS.split())
    yield from ((f"math.{name}", getattr(math, name)) for name in dir(math) if not name.startswith("_"))
    yield from ((f"torch.{name}", getattr(torch, name)) for name in (*_FACTORIES.split(), *_SYMBOLIC.split()))
    modes = torch.amp.autocast_mode
    yield from ((f"torch.amp.autocast_mode.{name}", getattr(modes, name)) for name in _MODES.split())
    yield "torch.Tensor", torch.Tensor
    for space, functions in get_overridable_functions().items():
        prefix = getattr(space, "__name__", "torch.Tensor") if space is not torch.Tensor else "torch.Tensor"
        for function in functions:
            name = getattr(function, "__name__", "_")
            if space is not torch.Tensor and not name.startswith("_") and getattr(space, name, None) is function:
                yield f"{prefix}.{name}", function
