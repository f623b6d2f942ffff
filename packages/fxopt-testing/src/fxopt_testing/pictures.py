"""`picture`: structure and contents of a graph module as comparable rows, one for each name."""

from __future__ import annotations

import contextvars
import ctypes
import gc
from collections.abc import Iterator, Mapping
from typing import TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node

from fxopt_core import iter_nodes

Picture: TypeAlias = "dict[str, object]"


def picture(graph_module: GraphModule, *, marks: bool = False) -> Picture:
    """Return nodes, modules, flags, tensors bit for bit, ties, keys and code of a graph module.

    Identities and `meta` are left out; with ``marks``, what fxopt noted in `meta` is included.
    """
    rows: Picture = {}
    nodes = list(iter_nodes(graph_module.graph))
    rows["order of nodes"] = tuple(node.name for node in nodes)
    for node in nodes:
        rows[f"node `{node.name}`"] = _node(node)
        if marks:
            rows[f"marks of node `{node.name}`"] = node.meta.get("fxopt")
    rows["order of modules"] = tuple(name for name, _ in graph_module.named_modules(remove_duplicate=False))
    for name, module in graph_module.named_modules(remove_duplicate=False):
        rows[f"module `{name}`"] = _module(module, is_root=not name)
    rows.update(tensors_of(graph_module))
    rows["keys of the state_dict"] = tuple(graph_module.state_dict())
    rows["code"] = graph_module.code
    for name, module in graph_module.named_modules():
        if name and isinstance(module, GraphModule):
            rows[f"graph of `{name}`"] = tuple(map(_node, iter_nodes(module.graph)))
            rows[f"code of `{name}`"] = module.code
    return rows


def _node(node: Node) -> object:
    users = tuple(sorted(user.name for user in node.users))
    target = node.target if isinstance(node.target, str) else getattr(node.target, "__qualname__", str(node.target))
    return node.op, target, repr(node.args), repr(node.kwargs), users  # which keep types and all bits of numbers


def _module(module: nn.Module, *, is_root: bool) -> object:
    # How many hooks, not which: in a copy, a hook that is a method of a module is bound to the module's copy.
    hooks = tuple((key, len(value)) for key, value in sorted(vars(module).items()) if _is_hooks(key) and value)
    # Each graph module has a class of its own; the extra text of other modules gives their sizes.
    return ("the root" if is_root else f"{type(module).__name__}({module.extra_repr()})", module.training, hooks)


def _is_hooks(key: str) -> bool:
    """Whether an attribute holds hooks, except those for copying, which fxopt adds to all that it touches."""
    return key.endswith("_hooks") and key != "_deepcopy_hooks"


def tensors_of(root: nn.Module) -> Iterator[tuple[str, object]]:
    """Yield flags, ties and values of all parameters and buffers, by name."""
    first: dict[int, str] = {}
    for kind, each in (("parameter", root.named_parameters), ("buffer", root.named_buffers)):
        for name, tensor in each(remove_duplicate=False):
            tied = first.setdefault(id(tensor), name)
            flags = (type(tensor).__name__, tensor.dtype, str(tensor.device), tuple(tensor.shape), tensor.requires_grad)
            yield f"{kind} `{name}`", (*flags, None if tied == name else f"tied to {tied}")
            yield f"values of `{name}`", contents_of(tensor)


def contents_of(tensor: Tensor) -> bytes | None:
    """Return what a tensor holds, bit for bit; None if it has no values."""
    if tensor.is_meta or isinstance(tensor, FakeTensor) or nn.parameter.is_lazy(tensor):
        return None
    # Sparse and oneDNN tensors have no plain memory. The bytes are read without NumPy, which has no bfloat16.
    plain = tensor.detach().to_dense().cpu().contiguous()
    return ctypes.string_at(plain.data_ptr(), plain.nbytes) if plain.numel() else b""


def bits_of(outputs: object) -> list[object]:
    """Return the bits of all tensors in outputs of any structure."""
    return [
        (leaf.dtype, tuple(leaf.shape), contents_of(leaf)) if isinstance(leaf, Tensor) else leaf
        for leaf in torch.utils._pytree.tree_leaves(outputs)
    ]


def state_of(root: nn.Module) -> Picture:
    """Return all of a module that a pass must not touch: values, memory, versions, flags, keys, hooks, attributes."""
    found = dict(tensors_of(root)) | {"keys of the state_dict": tuple(root.state_dict())}
    for name, module in root.named_modules(remove_duplicate=False):
        rows_of_hooks = [len(value) for key, value in sorted(vars(module).items()) if key.endswith("_hooks")]
        found[f"module `{name}`"] = type(module), id(module), module.training, tuple(rows_of_hooks)
        found[f"attributes of `{name}`"] = tuple(sorted(vars(module)))
    for name, tensor in root.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            # Meta tensors have no memory, lazy ones no strides either, and inference tensors no version.
            known = None if tensor.is_meta or nn.parameter.is_lazy(tensor) else tensor.data_ptr()
            version = None if tensor.is_inference() else tensor._version
            strides = () if nn.parameter.is_lazy(tensor) else tensor.stride()
            found[f"memory of `{name}`"] = id(tensor), known, version, strides
    return found


def modes_of_process() -> Picture:
    """Return the state of the process: modes, random numbers, context variables."""
    return {
        "grad mode": torch.is_grad_enabled(),
        "inference mode": torch.is_inference_mode_enabled(),
        "the default dtype": torch.get_default_dtype(),
        "autocast": torch.is_autocast_enabled("cpu"),
        "the state of random numbers": contents_of(torch.get_rng_state()),
        "the garbage collector": gc.isenabled(),
        "context variables": tuple(
            sorted((each.name, id(value)) for each, value in contextvars.copy_context().items())
        ),
    }


def changes(
    before: Mapping[str, object], after: Mapping[str, object], *, limit: int | None = 3
) -> list[tuple[str, str, str]]:
    """Return the differences: name, new value and old value."""
    found = []
    for name in dict.fromkeys([*before, *after]):
        old, new = before.get(name, "absent"), after.get(name, "absent")
        # By type too: 1, 1.0 and True are equal.
        if type(old) is not type(new) or old != new:
            found.append((name, short(new, old), short(old, new)))
    return found[:limit]


def short(value: object, other: object = None) -> str:
    """Return a value in a few words that show how it differs from another."""
    if isinstance(value, bytes):
        return f"{len(value)} bytes" if not isinstance(other, bytes) or len(other) != len(value) else "other values"
    if isinstance(value, tuple) and isinstance(other, tuple) and len(value) == len(other):
        value = next((mine for mine, theirs in zip(value, other, strict=True) if mine != theirs), value)
    text = str(value)
    return text if len(text) <= 160 else f"{text[:100]} ... {text[-50:]}"
