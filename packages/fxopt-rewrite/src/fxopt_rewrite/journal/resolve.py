"""From records back to values: numbers become nodes, names become functions and classes, rows become modules."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch.utils._pytree as pytree
from torch import Tensor, nn
from torch.fx.node import map_aggregate

from fxopt_core import import_class
from fxopt_rewrite.data.forms import ValueReader
from fxopt_rewrite.data.policies import Unresolved
from fxopt_rewrite.journal.edits import Listed, ModuleRow, NodeRow, Ref, TensorRow


def mapped(
    value: Any, node_of: Callable[[Ref], Any], named: Callable[[Unresolved], Any] = lambda unresolved: unresolved
) -> Any:
    """Return a recorded value with ``node_of`` applied to each reference, and ``named`` to each unresolved name.

    >>> mapped({"a": (1, slice(Ref(2), None))}, lambda ref: Ref(ref.id + 1))
    {'a': (1, slice(Ref(id=3), None, None))}
    >>> mapped([Ref(2), Unresolved("math:sqrt")], lambda ref: f"node {ref.id}", imported)
    ['node 2', <built-in function sqrt>]
    """

    def mapped_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Ref):
            return node_of(leaf)
        return named(leaf) if isinstance(leaf, Unresolved) else leaf

    return map_aggregate(value, mapped_leaf)


def refs_of(row: NodeRow) -> list[int]:
    """Return the numbers of the nodes that a row reads, in order, repeated where it reads one repeatedly."""
    found: list[int] = []
    mapped((row.args, row.kwargs), lambda ref: found.append(ref.id))
    return found


def imported(value: Unresolved) -> Any:
    """Return the function or class with a name, or the value of a class."""
    found = import_class(value.name)
    if value.form is None:
        return found
    return ValueReader({}).read(json.loads(value.form))  # importing its class makes it readable


def recall_meta(value: Any) -> Any:
    """Return a recorded ``meta``, where a class that cannot be imported becomes text, as in torch's export graphs.

    >>> recall_meta({"nn_module_stack": {"a": ("a", Unresolved("nowhere:Attention"))}})
    {'nn_module_stack': {'a': ('a', 'nowhere.Attention')}}
    """

    def named(unresolved: Unresolved) -> Any:
        try:
            return imported(unresolved)
        except Exception:  # importing a third-party module may raise anything
            return unresolved.name.replace(":", ".")

    return pytree.tree_map_only(Unresolved, named, value)


def module_of(row: ModuleRow, cls: type[nn.Module], value_of: Callable[[TensorRow], Tensor | None]) -> nn.Module:
    """Return a module of this class as a row describes it; ``value_of`` makes its tensors, nothing is initialised."""
    module: nn.Module = cls.__new__(cls)
    nn.Module.__init__(module)
    vars(module).update((key, list(v.items) if isinstance(v, Listed) else v) for key, v in row.attributes)
    for tensor in row.tensors:
        key = tensor.name.rpartition(".")[2]
        values: dict[str, Any] = module._parameters if tensor.is_parameter else module._buffers
        values[key] = value_of(tensor)
        if not tensor.persistent:
            module._non_persistent_buffers_set.add(key)
    return module
