"""`Effects`: what may share memory in a graph, and where it is written.

Values that may share memory form classes (a union-find over nodes and storages). Each class keeps the positions of the
nodes that write it, so that a query costs a binary search. The answer is "yes" unless "no" can be proved. One class
holds:

- a node and the inputs that its result may be, or be a view of, by schemas and by `fxopt_rewrite.ops.tables`;
- ``get_attr`` nodes of one storage, whatever their names;
- inputs, results and tensors of an opaque call (of what is not torch's, or has hooks), which may write all of them;
- all inputs of the graph, as soon as one is written: a caller may pass the same tensor twice.

Not covered are a caller who passes a parameter of the module itself, and functions that keep tensors between calls.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Hashable, Sequence

from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt_core import iter_nodes
from fxopt_rewrite.effects.layout import needs_own_memory
from fxopt_rewrite.effects.modules import ModuleRule, rule_of_module, tensors_of
from fxopt_rewrite.effects.rules import Effect, Rule, rule_of_function, rule_of_getattr, rule_of_method
from fxopt_rewrite.shapes.kinds import MEMORY_FREE, Kind, attribute, kind_of

_MODE_PREFIXES = ("_set_", "set_", "_enter_", "_exit_", "_push_", "_pop_")


def changes_mode(node: Node) -> bool:
    """Return whether a node changes a global mode of torch, such as gradients, autocast or a default dtype.

    >>> import torch
    >>> graph = torch.fx.Graph()
    >>> changes_mode(graph.call_function(torch._C._set_grad_enabled, (False,)))
    True
    """
    name = str(getattr(node.target, "__name__", "")) if node.op == "call_function" else ""
    # Exits take the node that entered.
    return name.startswith(_MODE_PREFIXES) and (not node.all_input_nodes or name.startswith("_exit_"))


def _any_between(places: list[int], first: int, last: int) -> bool:
    following = bisect_right(places, first)
    return following < len(places) and places[following] < last


class Effects:
    """What the nodes of one graph module write, and which values may share memory; made in about linear time.

    Answers hold for the graph at that time. The value of a node that was added later counts as written everywhere.

    >>> import torch
    >>> def double(x):
    ...     y = x.view(-1)
    ...     z = x + 1
    ...     y.mul_(2)
    ...     return z, x.sum()
    >>> graph_module = torch.fx.symbolic_trace(double)
    >>> x, y, z, mul, total, _ = graph_module.graph.nodes
    >>> effects = Effects(graph_module)
    >>> effects.written_between(x, z, total), effects.written_between(z, z, total), effects.writes(mul)
    (True, False, (view,))
    """

    def __init__(self, graph_module: GraphModule) -> None:
        self._graph_module = graph_module
        self._positions: dict[Node, int] = {}
        self._kinds: dict[Node, Kind] = {}
        self._effects: dict[Node, Effect] = {}
        self._classes = _Classes()
        self._rules: dict[object, Rule] = {}
        self._modules: dict[str, tuple[ModuleRule, Hashable]] = {}
        self._mode_changes: list[int] = []
        writes: list[tuple[int, Hashable]] = []
        for position, node in enumerate(iter_nodes(graph_module.graph)):
            self._positions[node] = position
            if node.op == "call_function" and changes_mode(node):
                self._mode_changes.append(position)
            writes += [(position, written) for written in self._read(node)]
        # Inputs may share memory: what writes to one of them may write to all.
        inputs = [node for node in self._positions if node.op == "placeholder"]
        classes = {self._classes.find(node) for node in inputs}
        if any(self._classes.find(written) in classes for _, written in writes):
            for node in inputs[1:]:
                self._classes.join(inputs[0], node)
        self._written: dict[Hashable, list[int]] = {}
        # Ascending in each class, as nodes were visited in order: `_any_between` bisects.
        for position, written in writes:
            self._written.setdefault(self._classes.find(written), []).append(position)
        self._rules.clear()  # an id may be given again

    def effect(self, node: Node) -> Effect:
        """Return which inputs a node may write, and which its result may share memory with."""
        found = self._effects.get(node)
        return self._rule(node).apply(node, self._kind) if found is None else found

    def writes(self, node: Node) -> tuple[Node, ...]:
        """Return the inputs of a node whose memory it may write."""
        return self.effect(node).writes

    def aliases(self, node: Node) -> tuple[Node, ...]:
        """Return the inputs of a node with which its result may share memory."""
        return self.effect(node).aliases

    def written_between(self, node: Node, start: Node, end: Node) -> bool:
        """Return whether a node's memory may be written between ``start`` and ``end``, in either order, both excluded.

        If not, both see the same value. A change of a global mode between them (autocast, ``no_grad``) counts as a
        write.
        """
        if not {node, start, end} <= self._positions.keys():
            return True
        if not self._written and not self._mode_changes:  # as in most graphs
            return False
        first, last = sorted((self._positions[start], self._positions[end]))
        if _any_between(self._mode_changes, first, last):
            return True
        if self._kind(node) in MEMORY_FREE:
            return False
        return _any_between(self._written.get(self._classes.find(node), []), first, last)

    def tensor_written(self, tensor: Tensor) -> bool:
        """Return whether a parameter or buffer, or a tensor over its storage, may be written anywhere in the graph.

        In-place operations on ``get_attr`` nodes, batch norms in train mode and opaque modules write.
        """
        return bool(self._written) and self._classes.find(_storage_of(tensor)) in self._written

    def needs_own_memory(self, node: Node) -> bool:
        """Return whether the graph may notice that a value becomes a slice of a larger tensor's last dimension.

        A slice has the same values, but other strides. In-place writes notice them, and so do ``view`` across rows,
        ``as_strided`` and similar operations, opaque calls, and the caller if the value or a view of it is returned. A
        ``view`` is fine if it provably splits the last dimension, by constants (``view(b, -1, 12, 64)`` of 768 columns)
        or by known shapes.
        """
        return needs_own_memory(node, self.effect, self._graph_module)

    def _kind(self, node: Node) -> Kind:
        found = self._kinds.get(node)
        return kind_of(node, self._kinds, self._graph_module) if found is None else found

    def _read(self, node: Node) -> Sequence[Hashable]:
        """Note what a node does; return what it writes."""
        effect = self._effects[node] = self.effect(node)
        for alias in effect.aliases:
            self._classes.join(alias, node)
        if node.op == "get_attr":
            self._read_attribute(node)
        elif node.op == "call_module":
            return [*self._state_written(node, effect), *effect.writes]
        return effect.writes

    def _rule(self, node: Node) -> Rule:
        if node.op == "call_module":
            return self._module(str(node.target))[0].rule
        if node.op == "call_method":
            return rule_of_method(str(node.target))
        if node.op != "call_function" or isinstance(node.target, str):
            return _NOTHING
        if node.target is getattr:
            return rule_of_getattr(node.args[1] if len(node.args) > 1 else None)
        key = id(node.target)  # a callable object need not be hashable
        if key not in self._rules:
            self._rules[key] = rule_of_function(node.target)
        return self._rules[key]

    def _module(self, target: str) -> tuple[ModuleRule, Hashable]:
        if target not in self._modules:
            module = attribute(self._graph_module, target)
            self._modules[target] = (rule_of_module(module), ("module", id(module)))
        return self._modules[target]

    def _state_written(self, node: Node, effect: Effect) -> Sequence[Hashable]:
        rule, identity = self._module(str(node.target))
        if not effect.opaque:
            return [_storage_of(tensor) for tensor in rule.written]
        # Once for each module, since a graph may call a large one many times.
        if not self._classes.knows(identity):
            for tensor in rule.written:
                self._classes.join(identity, _storage_of(tensor))
        self._classes.join(identity, node)
        return (identity,)

    def _read_attribute(self, node: Node) -> None:
        value = attribute(self._graph_module, str(node.target))
        if isinstance(value, Tensor):
            self._classes.join(_storage_of(value), node)
            return
        for tensor in tensors_of(value) if isinstance(value, nn.Module) else ():
            self._classes.join(_storage_of(tensor), node)
        # Two nodes that read the same list or object reach the same contents.
        if not isinstance(value, (int, float, str, type(None))):
            self._classes.join(("object", id(value)), node)


_NOTHING = Rule()


class _Classes:
    """Disjoint sets of values that may share memory."""

    def __init__(self) -> None:
        self._parents: dict[Hashable, Hashable] = {}

    def find(self, element: Hashable) -> Hashable:
        parents = self._parents
        while (parent := parents.get(element, element)) != element:
            parents[element] = parents.get(parent, parent)
            element = parent
        return element

    def knows(self, element: Hashable) -> bool:
        return element in self._parents

    def join(self, one: Hashable, other: Hashable) -> None:
        root, child = self.find(one), self.find(other)
        self._parents[root] = self._parents[child] = root


def _storage_of(tensor: Tensor) -> Hashable:
    """Return a key that is equal for tensors that share their storage."""
    try:
        return "storage", tensor.untyped_storage()._cdata
    except (NotImplementedError, RuntimeError, ValueError):  # sparse, opaque and lazy tensors have none
        return "tensor", id(tensor)
