"""What a node may call, in torch's own words: one name and one signature for all forms of an operation.

``nn.ReLU``, ``F.relu``, ``x.relu_()`` and ``aten.relu.default`` are all ``relu`` of one ``input``; ``nn.Conv2d`` and
``aten.conv2d.padding`` have the arguments of ``F.conv2d``. Names, parameters and defaults come from the functions of
``torch.nn.functional`` where they are written in Python, and from the schemas of operators otherwise; the tables here
hold what neither says.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch._ops import OpOverload, OpOverloadPacket
from torch.fx import Node

from fxopt_rewrite.ops.names import (
    MISSING,
    NUMPY,
    argument,
    aten_name,
    aten_overloads,
    overloads_of,
    source_of,
)

_SYNONYMS = """
abs absolute; acos arccos; acosh arccosh; asin arcsin; asinh arcsinh; atan arctan; atan2 arctan2; atanh arctanh;
bitwise_and __and__; bitwise_or __or__; bitwise_xor __xor__; bitwise_left_shift __lshift__; bitwise_right_shift
__rshift__; cat concat concatenate; clamp clip; div divide true_divide; ge greater_equal; gt greater; inverse
linalg_inv; le less_equal; lt less; matmul linalg_matmul; movedim moveaxis; mul multiply; ne not_equal; neg
negative; numel nelement sym_numel; outer ger; pad constant_pad_nd; sigmoid special_expit; size sym_size; split
split_with_sizes; sub subtract; transpose swapaxes swapdims; trunc fix
"""
#: From the name of a synonym to the name of the operator. Untrusted files may call the one if they may call the other.
SYNONYMS = {name: row.split()[0] for row in _SYNONYMS.split(";") for name in row.split()[1:]}

_PYTHON = """
abs add and:bitwise_and and_:bitwise_and eq floordiv:floor_divide ge getitem gt inv:bitwise_not invert:bitwise_not le
lshift:bitwise_left_shift lt matmul mod:remainder mul ne neg or:bitwise_or or_:bitwise_or pos:positive pow
rshift:bitwise_right_shift setitem sub truediv:div xor:bitwise_xor
"""
#: From functions of ``operator`` to the torch operators that do the same for tensors.
_OPERATORS = {each.partition(":")[0]: each.rpartition(":")[2] for each in _PYTHON.split()}

#: From attributes of tensors to the operations that reading them computes.
_ATTRIBUTES = {"shape": "size", "ndim": "dim", **{name: name for name in ("T", "mT", "H", "mH", "dtype", "device")}}

_MODULES = """
adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d alpha_dropout avg_pool1d avg_pool2d avg_pool3d conv1d
conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d dropout dropout1d dropout2d dropout3d elu embedding
feature_alpha_dropout flatten gelu group_norm hardsigmoid hardswish hardtanh identity layer_norm leaky_relu linear
log_sigmoid log_softmax max_pool1d max_pool2d max_pool3d mish relu relu6 rms_norm selu sigmoid silu softmax softplus
tanh
"""
_CLASSES = {name: cls for name, cls in vars(nn).items() if isinstance(cls, type)}
_LOWER = {name.lower(): cls for name, cls in _CLASSES.items()}
#: From modules to the operations that they compute; the arguments are attributes of the module by the same names.
MODULES: Mapping[type[nn.Module], str] = {
    **{_LOWER[name.replace("_", "")]: name for name in _MODULES.split()},
    **{cls: "batch_norm" for name, cls in _CLASSES.items() if "BatchNorm" in name},
    **{cls: "pad" for name, cls in _CLASSES.items() if name.startswith(("ConstantPad", "ZeroPad"))},
}

#: From names of arguments to those of torch's functions, in any operation: `aten.relu(self)` is `F.relu(input)`.
_RENAMED = {"self": "input", "train": "training", "indices": "input", "tensor": "input"}
#: From names of arguments of operators and modules to those of torch's functions, where they differ.
_RENAMED_IN = {
    "split": dict.fromkeys(("split_size", "split_sizes"), "split_size_or_sections"),
    "transpose": {"axis0": "dim0", "axis1": "dim1"},
}

#: Parameters and defaults that no signature has.
_IMPLIED: Mapping[str, Mapping[str, object]] = {
    "div": {"rounding_mode": None},
    "getitem": {"input": MISSING, "index": MISSING},
    "identity": {"input": MISSING},
    "setitem": {"input": MISSING, "index": MISSING, "value": MISSING},
    "size": {"input": MISSING, "dim": None},
    "split": {"input": MISSING, "split_size_or_sections": MISSING, "dim": 0},
}

#: Parameters that do not change what is computed.
_NO_SETTINGS = frozenset({"inplace", "_stacklevel", "cudnn_enable", "cudnn_enabled"})

#: Sizes that may be given as one number for all dimensions.
_WINDOWS = frozenset({"kernel_size", "stride", "padding", "dilation", "output_padding", "output_size"})


class Parameter(NamedTuple):
    """A parameter of one form: its name in the form, default (`MISSING` for none), and type."""

    name: str
    default: object
    keyword: bool = False
    type: str = ""


class Called(NamedTuple):
    """What a target is.

    Attributes:
        name: the operation, as torch's functional API calls it.
        inplace: whether it writes its result into its input.
        forms: the ways to give its arguments.
    """

    name: str
    inplace: bool
    forms: tuple[tuple[Parameter, ...], ...]


_known: dict[object, Called] = {}


def called(node: Node) -> Called | None:
    """Return what a node calls; None for modules, and for what is not torch's."""
    if node.op == "call_function":
        if node.target is getattr:
            name = _ATTRIBUTES.get(str(node.args[1]))
            return None if name is None else Called(name, False, ())
        return called_function(node.target)
    return called_method(str(node.target)) if node.op == "call_method" else None


def called_function(target: Any) -> Called | None:
    """Return what a function of torch, ``operator`` or ``aten`` is; None for any other.

    >>> import operator
    >>> [called_function(each).name for each in (operator.iadd, torch.divide, F.relu, torch.ops.aten.softmax.int)]
    ['add', 'div', 'relu', 'softmax']
    """
    try:
        return _known[target]
    except (KeyError, TypeError):  # a callable object need not be hashable
        found = _read_function(target)
        if found is not None:
            _known[target] = found
        return found


@cache
def called_method(name: str) -> Called | None:
    """Return what a method of ``Tensor`` is; None if there is no such method."""
    if name.startswith("__") and name.endswith("__"):
        return _read_operator(name.strip("_"))
    method = getattr(torch.Tensor, name, None)
    if not callable(method):
        return None
    overloads = aten_overloads(name)
    if not overloads and isinstance(method, types.FunctionType):
        return _called(name, [_form_of_python(method)])
    return _called(name, map(_form_of_schema, overloads))


def _read_function(target: Callable[..., object]) -> Called | None:
    if isinstance(target, OpOverload | OpOverloadPacket):
        aten = aten_name(target)
        return None if aten is None else _called(aten, map(_form_of_schema, overloads_of(target)))
    source, name = source_of(target)
    if source == "operator" or (source == "builtins" and name in ("abs", "pow")):
        return _read_operator(name)
    if source == "method":
        return called_method(name)
    if source == "functional" or (source == "aten" and isinstance(target, types.FunctionType)):
        return _called(name, [_form_of_python(target)])
    return _called(name, map(_form_of_schema, aten_overloads(name))) if source == "aten" else None


def _read_operator(name: str) -> Called | None:
    # `iadd` is `add` in place, but the i of `inv` and `invert` belongs to the name.
    plain = name.removeprefix("i") if name.startswith("i") and name not in ("inv", "invert") else name
    plain = "truediv" if plain == "div" else plain
    operation = _OPERATORS.get(plain)
    if operation is None:
        return None
    forms = [tuple(Parameter(key, value) for key, value in _IMPLIED.get(operation, {}).items())]
    forms = list(map(_form_of_schema, aten_overloads(operation))) or forms
    return Called(operation, plain != name, tuple(forms))


def _called(name: str, forms: Iterable[tuple[Parameter, ...]]) -> Called:
    bare = name.rstrip("_") if name.endswith("_") and not name.endswith("__") else name
    return Called(SYNONYMS.get(bare, bare), bare != name, tuple(forms))


@cache
def _form_of_schema(overload: OpOverload) -> tuple[Parameter, ...]:
    made = []
    for each in overload._schema.arguments:
        default = each.default_value if each.has_default_value() else MISSING
        default = torch.contiguous_format if each.name == "memory_format" and default == 0 else default  # an enum
        made.append(Parameter(each.name, default, each.kwarg_only, str(each.real_type)))
    return tuple(made)


@cache
def _form_of_python(function: Callable[..., object]) -> tuple[Parameter, ...]:
    parameters = inspect.signature(function).parameters.values()
    if any(each.kind is each.VAR_KEYWORD for each in parameters):  # a pool, with or without indices
        parameters = inspect.signature(getattr(F, f"{function.__name__}_with_indices")).parameters.values()
    return tuple(
        Parameter(each.name, MISSING if each.default is each.empty else each.default, each.kind is each.KEYWORD_ONLY)
        for each in parameters
        if each.kind is not each.VAR_POSITIONAL
    )


@cache
def signature_of(name: str) -> Mapping[str, object]:
    """Return the parameters of an operation in torch's order, with their defaults, `MISSING` for none.

    >>> [name for name in signature_of("batch_norm")]
    ['input', 'running_mean', 'running_var', 'weight', 'bias', 'training', 'momentum', 'eps']
    """
    if {"input"} <= _IMPLIED.get(name, {}).keys():
        return _IMPLIED[name]
    function, overloads = getattr(F, name, None), aten_overloads(name)
    if _is_function(name):
        form = _form_of_python(function)
    else:
        form = _form_of_schema(overloads[0]) if overloads else (Parameter("input", MISSING),)
    found = {_renamed(name, each.name): each.default for each in form if each.name not in _NO_SETTINGS}
    return {**found, **_IMPLIED.get(name, {})}


def _renamed(operation: str, parameter: str) -> str:
    renamed = _RENAMED_IN.get(operation, {}).get(parameter) or _RENAMED.get(parameter, parameter)
    # The indices of `index_put` and others are not their input.
    return parameter if parameter == "indices" and operation != "embedding" else renamed


def bind(called: Called, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[dict[str, Any], bool]:
    """Return the arguments of a call by the names of its operation, with defaults, and whether it works in place.

    Arguments that no form of the operation has are numbered, or keep their names.
    """
    found, form = None, called.forms[0] if called.forms else (Parameter("input", MISSING),)
    # The first form that fits counts. torch's `normalize_function` gives up where several do.
    for each in called.forms:
        found = _bound(each, args, kwargs)
        if found is not None:
            form = each
            break
    if found is None:
        names = [*(each.name for each in form), *(f"#{place}" for place in range(len(form), len(args)))]
        found = {**dict(zip(names, args, strict=False)), **kwargs}
    inplace = called.inplace or bool(found.pop("inplace", False))
    expected = signature_of(called.name)
    defaults = {_renamed(called.name, each.name): each.default for each in form}
    known = expected if _is_function(called.name) else {**defaults, **expected}
    given = {_renamed(called.name, key): value for key, value in found.items() if key not in _NO_SETTINGS}
    if called.name == "embedding" and given.get("padding_idx") == -1 and form and form[0].name == "weight":
        del given["padding_idx"]  # the operator's way to say that there is none
    made = {key: given.pop(key, default) for key, default in known.items() if key in given or default is not MISSING}
    made |= {key: value for key, value in given.items() if key not in defaults or value != defaults[key]}
    return {key: plain(called.name, key, value) for key, value in made.items() if key not in _NO_SETTINGS}, inplace


@cache
def _is_function(name: str) -> bool:
    """Return whether an operation has one signature, that of a Python function; others have those of overloads."""
    return source_of(getattr(F, name, None)) == ("functional", name)


def plain(operation: str, key: str, value: Any) -> Any:
    """Return a value with tuples for lists, and one size for each dimension of a window."""
    if isinstance(value, list) and key != "index":  # ``x[[0, 1]]`` is not ``x[0, 1]``
        value = tuple(value)
    if key in _WINDOWS and operation[-2:] in ("1d", "2d", "3d"):
        dims = int(operation[-2])
        if type(value) is int or (isinstance(value, tuple) and len(value) == 1):
            return (value if isinstance(value, tuple) else (value,)) * dims
    return value


def _bound(form: tuple[Parameter, ...], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a call by name if they are those of a form; else None."""
    placed = [each for each in form if not each.keyword]
    last = placed[-1] if placed else None
    if len(args) > len(placed) or (len(args) == len(placed) and args and type(args[-1]) is int):
        if last is None or last.type != "List[int]":  # ``x.view(2, 3)`` has its sizes one by one
            if len(args) > len(placed):
                return None
        else:
            args = (*args[: len(placed) - 1], tuple(args[len(placed) - 1 :]))
    found = {each.name: value for each, value in zip(placed, args, strict=False)}
    names = {each.name for each in form}
    for key, value in kwargs.items():
        name = key if key in names else NUMPY.get(key, key)
        name = "self" if name == "input" and "self" in names else name
        if name not in names or name in found:
            return None
        found[name] = value
    for each in form:
        if each.name not in found:
            if each.default is MISSING:
                return None
            continue
        value = found[each.name]
        if each.type and not _fits(value, each.type):
            return None
        # `x.sum(1)` is `x.sum((1,))`. Sizes of windows are repeated for each dimension, in `plain`.
        if type(value) is int and "List[int]" in each.type and each.name not in _WINDOWS:
            found[each.name] = (value,)
    return found


#: What may be given for a type of a schema; a type that is not listed takes any literal.
_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int, torch.SymInt),
    "float": (int, float, torch.SymInt, torch.SymFloat),
    "number": (int, float, complex, torch.SymInt, torch.SymFloat),
    "bool": (bool,),
    "str": (str,),
    "ScalarType": (torch.dtype,),
    "Device": (torch.device, str, int),
    "Layout": (torch.layout,),
    "MemoryFormat": (torch.memory_format,),
    "Tensor": (torch.Tensor,),
}


def _fits(value: object, kind: str) -> bool:
    if kind.startswith("Optional["):
        return value is None or _fits(value, kind[9:-1])
    if kind.startswith("List["):
        return isinstance(value, list | tuple | Node) or (type(value) is int and kind == "List[int]")
    types = _TYPES.get(kind)
    if isinstance(value, Node):  # which may be a number or a tensor, and is no literal
        return types is not None and kind not in ("str", "bool", "ScalarType", "Device", "Layout", "MemoryFormat")
    return types is None or isinstance(value, types)


def says_training(node: Node) -> bool:
    """Return whether an argument of an ATen operator sets train mode."""
    if not isinstance(node.target, OpOverload) or aten_name(node.target) is None:
        return False
    arguments = enumerate(node.target._schema.arguments)
    return any(argument(node, place, each.name) is True for place, each in arguments if "train" in each.name)
