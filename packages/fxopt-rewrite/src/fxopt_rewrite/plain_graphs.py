"""Checks of layers and graphs from an untrusted file, before torch generates code from them."""

from __future__ import annotations

import math
from collections import OrderedDict
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.immutable_collections import immutable_dict, immutable_list

from fxopt_core import describe, iter_nodes
from fxopt_rewrite._torch import enter_autocast, exit_autocast
from fxopt_rewrite.data.forms import MalformedError
from fxopt_rewrite.plain_names import is_plain_identifier, is_plain_path
from fxopt_rewrite.plain_operators import is_plain_operator

_DATA = frozenset({
    bool, int, float, complex, str, bytes, range, type(None), type(...), Node,
    torch.dtype, torch.device, torch.layout, torch.memory_format,
})  # fmt: skip


def check_settings(owner: object, **kinds: Any) -> None:
    """Check attributes of a layer against kinds: a type, the least value of an integer, or a tuple of kinds.

    No integer may be above 2**40, so that products of two and sums of many do not overflow in C++. An integer also
    passes for a float.

    Raises:
        ValueError: An attribute is something else; the message gives its name, its value and what is expected.

    >>> check_settings(nn.Conv2d(2, 3, 1), in_channels=1, stride=(1, 1), dilation=(1, ...), bias=nn.Parameter)
    >>> check_settings(nn.Linear(2, 3), in_features=3)
    Traceback (most recent call last):
    ValueError: in_features is 2, expected at least 3, and at most 2**40
    """
    for name, kind in kinds.items():
        value = getattr(owner, name)
        if not _is_of_kind(value, kind):
            expected = kind.__name__ if isinstance(kind, type) else f"at least {kind}, and at most 2**40"
            raise ValueError(f"{name} is {value!r:.60}, expected {expected}")


def _is_of_kind(value: object, kind: Any) -> bool:
    if isinstance(kind, tuple):
        if type(value) is not tuple:
            return False
        kinds = kind[:1] * len(value) if kind[1:] == (...,) else kind
        return len(value) == len(kinds) and all(map(_is_of_kind, value, kinds))
    if isinstance(kind, type):
        return type(value) is kind or (kind is float and _is_of_kind(value, -(2**40)))
    return type(value) is int and kind <= value <= 2**40


def is_plain_value(value: Any) -> bool:
    """Return whether a value is data or a class, not a function, so that generated code may contain it."""
    cls = type(value)
    if cls in (list, set, frozenset, torch.Size, immutable_list) or isinstance(value, tuple):
        return all(map(is_plain_value, value))
    if cls in (dict, OrderedDict, immutable_dict):
        return all(is_plain_value(key) and is_plain_value(item) for key, item in value.items())
    if cls is slice:
        return all(map(is_plain_value, (value.start, value.stop, value.step)))
    return cls in _DATA or isinstance(value, Enum | Tensor | type)


def check_values(graph: Graph) -> None:
    """Check that arguments and annotations of nodes are data and classes, before code is generated from them.

    Functions are refused, so that no operation gets one to call; so is `key=`, which ``max`` calls.
    """
    for node in iter_nodes(graph):
        if not is_plain_identifier(node.name):
            raise MalformedError(f"{node.name!r:.60} is not the name of a node")
        for value in (*node.args, *node.kwargs.values()):
            if not (is_plain_value(value) or is_plain_operator(value)):
                raise MalformedError(f"node `{node.name}` has {describe(value)} among its arguments, which is not data")
        if _is_excessive(node):
            raise MalformedError(
                f"node `{node.name}` calls `{node.target}` with numbers that give a number of more than {_BITS} bits, "
                f"or a value of more than {_ELEMENTS} elements"
            )
        if "key" in node.kwargs and getattr(node.target, "__module__", None) == "builtins":
            raise MalformedError(f"node `{node.name}` gives `{node.target}` a key, a function to call")
        if not isinstance(node.type, type | str | None):
            raise MalformedError(f"node `{node.name}` has {describe(node.type)} for a type")
    # torch traces autocast as two calls, the second of which gets what the first returned: no `with` pairs them.
    entered = [node for node in iter_nodes(graph) if node.target is enter_autocast]
    left = [node.args[0] for node in iter_nodes(graph) if node.target is exit_autocast and node.args]
    if len(entered) != len(left) or set(entered) != set(left):
        raise MalformedError("a region of autocast is entered and not left, which would change what others compute")


_BITS, _ITEMS, _ELEMENTS = 4096, 2**20, 2**30  # of a number, of a sequence of Python, and of a tensor
_POWERS = "pow ipow rpow lshift ilshift rlshift float_power matrix_power"
#: The names of their arguments in the order of the parameters: a file may name them in any.
_OF_POWERS = ("base", "input", "self", "exp", "exponent", "n", "mod")
_PRODUCTS = "mul imul rmul add iadd concat iconcat"
_SIZED = """
    arange empty empty_permuted empty_strided expand eye full interpolate new_empty new_empty_strided new_full new_ones
    new_zeros ones one_hot pad rand randint randn randperm range repeat repeat_interleave resize tile tril_indices
    triu_indices zeros linspace logspace broadcast_to bartlett_window blackman_window hamming_window hann_window
    kaiser_window bincount col2im combinations histc im2col istft linalg_vander max_unpool1d max_unpool2d max_unpool3d
    nonzero_static normal stft vander affine_grid fold iota pad_circular ps_roi_align ps_roi_pool roi_align roi_pool
    tensor_split unfold
"""
_SIZED_FAMILIES = ("adaptive_", "constant_pad", "conv", "fft_", "replication_pad", "slow_conv", "upsample_")
_SQUARED = "diag diag_embed diagflat eye"  # one number gives a matrix with as many rows and columns


def _is_excessive(node: Node) -> bool:
    """Return whether the literal numbers in a call, a few bytes in a file, make its result huge."""
    name = str(getattr(node.target, "__name__", node.target)).partition(".")[0].strip("_")
    values: list[Any] = [*node.args, *node.kwargs.values()]
    if any(isinstance(each, range) and (each.stop - each.start) // each.step > _ITEMS for each in values):
        return True
    numbers = [each for each in values if type(each) in (int, float)]
    if name in _POWERS.split():
        values = [*node.args, *(node.kwargs[key] for key in _OF_POWERS if key in node.kwargs)]
        base, power = (*values[1::-1], 0, 0)[:2] if name in ("rpow", "rlshift") else (*values[:2], 0, 0)[:2]
        if type(power) is not int or ("pow" in name and base in (-1, 0, 1, 1.0)):
            return False
        # A number of b bits to the power n has about b * n bits; a shift by n adds n.
        return power * (base.bit_length() if "pow" in name and type(base) is int else 1) > _BITS
    # `"%999999d" % 1` is a text of that length.
    if name in ("mod", "imod", "rmod"):
        return any(isinstance(each, (str, bytes)) for each in values)
    # `round(1, -n)` computes 10**n.
    if name == "round":
        return any(type(each) is int and each < -_BITS for each in values[1:])
    if name in _PRODUCTS.split():  # of a sequence
        lengths = [len(each) for each in values if isinstance(each, (list, tuple, str, bytes))]
        return bool(lengths) and any(max(*lengths, 1) * each > _ITEMS for each in numbers)
    if name in _SQUARED.split() and not (name == "eye" and len(numbers) > 1):
        return bool(numbers) and abs(numbers[0]) ** 2 > _ELEMENTS
    if name not in _SIZED.split() and not name.startswith(_SIZED_FAMILIES):
        return False
    nested = [each for each in values if isinstance(each, (list, tuple))]
    if name in ("arange", "range"):
        limit = _ITEMS if node.target is range else _ELEMENTS
        given = [0, *node.args, 1] if len(node.args) < 2 else [*node.args, 1][:3]
        named = zip(("start", "end", "step"), given if node.args else (0, 0, 1), strict=True)
        # A value that the graph computes counts as 1.
        found: list[Any] = [node.kwargs.get(key, value) for key, value in named]
        start, stop, step = (each if type(each) in (int, float) else 1 for each in found)
        return bool(step == 0 or abs((stop - start) / step) > limit)
    # Sizes come as one sequence, as in `zeros((2, 3))`, or one by one, as in `zeros(2, 3)`.
    sizes = [[each for each in sequence if type(each) is int] for sequence in nested] or [numbers]
    return any(math.prod(max(abs(each), 1) for each in some) > _ELEMENTS for some in sizes)


def check_targets(graph: Graph, root: nn.Module) -> None:
    """Check that every node reads a module or tensor that exists, not a method: code is generated from these names."""
    modules = dict(root.named_modules(remove_duplicate=False))
    for node in iter_nodes(graph):
        if node.op not in ("get_attr", "call_module"):
            continue
        path, _, name = str(node.target).rpartition(".")
        owner = modules.get(path)
        # Python finds an attribute of the class, such as a method, before a child, parameter or buffer of that name.
        has = owner is not None and not hasattr(type(owner), name) and (
            name in owner._modules
            or name in owner._parameters
            or name in owner._buffers
            or isinstance(vars(owner).get(name), Tensor)
        )  # fmt: skip
        if not (has and is_plain_path(node.target)) or (node.op == "call_module" and node.target not in modules):
            raise MalformedError(f"node `{node.name}` names `{node.target}`, which no module has")
