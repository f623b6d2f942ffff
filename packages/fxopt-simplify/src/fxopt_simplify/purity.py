"""Which calls may be left out, or made once instead of twice, without anything else changing."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import nn
from torch.fx import Node

from fxopt_rewrite import (
    DROPOUTS,
    PURE_ATTRIBUTES,
    GraphIndex,
    Kind,
    argument,
    aten_overloads,
    kind_of,
    read_operation,
    words,
)

#: Operations whose result has no other elements than their input, in its dtype.
SAME_ELEMENTS = words(
    """
    view reshape _unsafe_view unsqueeze squeeze expand expand_as broadcast_to slice select getitem transpose permute t
    flatten unflatten movedim contiguous clone detach alias lift_fresh_copy repeat narrow view_as reshape_as
    """
)
FACTORIES = words("arange full zeros ones scalar_tensor eye linspace")
FACTORIES_LIKE = words("zeros_like ones_like full_like new_zeros new_ones new_full")
_CALLS = ("call_function", "call_method", "call_module")
#: Calls whose value may differ each time or is undefined, and calls that are made for their check.
_NOT_REPEATABLE = words(
    """
    empty empty_like empty_strided empty_permuted new_empty new_empty_strided gumbel_softmax rrelu
    multi_head_attention_forward fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices
    fractional_max_pool3d_with_indices is_grad_enabled item builtins.print builtins.id builtins.hash builtins.iter
    builtins.next builtins.callable nn.GuardsFn
    """
)
_CHECKS = ("_assert", "_check", "sym_constrain", "_functional_assert", "_functional_sym")
#: Modules that may draw random numbers, by dropout of their own or by what they contain.
_STATEFUL_MODULES: tuple[type[nn.Module], ...] = (
    nn.RReLU,
    nn.FractionalMaxPool2d,
    nn.FractionalMaxPool3d,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.Sequential,
)


@dataclass(frozen=True, eq=False)
class CallSite:
    """One call of a graph, as the site of a pass."""

    node: Node

    @property
    def label(self) -> str:
        """The name of the node."""
        return self.node.name

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The call."""
        return (self.node,)


class Purity:
    """Tells which nodes of a graph compute a value and do nothing else; linear in the size of the graph."""

    def __init__(self, index: GraphIndex) -> None:
        self._index = index
        self._kinds: dict[Node, Kind] = {}

    def kind(self, node: Node) -> Kind:
        """Return the kind of a node's value."""
        found = self._kinds.get(node)
        return kind_of(node, self._kinds, self._index.graph_module) if found is None else found

    def is_pure(self, node: Node) -> bool:
        """Return whether a call gives the same for the same inputs, writes nothing and checks nothing."""
        if node.op not in _CALLS:
            return False
        effect = self._index.effects.effect(node)
        name = effect.operation
        if effect.opaque or effect.writes or name is None or self._is_random(node, name):
            return False
        if name in _NOT_REPEATABLE or name.startswith(_CHECKS):
            return False
        if node.op == "call_module":
            return self._is_pure_module(node)
        if node.target is getattr and argument(node, 1, "name") not in PURE_ATTRIBUTES:
            return False
        return self.kind(node) is not Kind.UNKNOWN

    def _is_random(self, node: Node, name: str) -> bool:
        operation = read_operation(self._index, node)
        if operation is not None and operation.name == "scaled_dot_product_attention":
            return operation.arguments["dropout_p"] not in (0, 0.0)
        if operation is not None and operation.name in DROPOUTS:
            return operation.arguments.get("training") is not False
        return _draws(name)

    def _is_pure_module(self, node: Node) -> bool:
        module = self._index.module_of(node)
        if module is None or isinstance(module, (*_STATEFUL_MODULES, torch.fx.GraphModule)):
            return False
        return not any(map(self._index.effects.tensor_written, (*module.parameters(), *module.buffers())))


@cache
def _draws(name: str) -> bool:
    """Return whether an operator of this name draws random numbers."""
    return any(torch.Tag.nondeterministic_seeded in overload.tags for overload in aten_overloads(name))
