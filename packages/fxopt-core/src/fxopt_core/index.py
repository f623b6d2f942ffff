"""`GraphIndex`: who reads what in one graph module, at one moment."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Mapping
from functools import cached_property

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt_core.call_forms import says_training
from fxopt_core.checks import check_graph_module
from fxopt_core.effects import Effects
from fxopt_core.graph import iter_nodes, modules_by_name
from fxopt_core.ledger import Refusal
from fxopt_core.same_values import SameValues

_NO_NODES: dict[Node, None] = {}


class GraphIndex:
    """Facts about one graph module, gathered in linear time; make a new one after an edit.

    Attributes:
        graph_module: the module.
        nodes: its nodes, in order.
        position: the place of each node in that order.
        modules: its modules by full name; one module under two names stands twice.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        check_graph_module(graph_module, "GraphIndex")
        self.graph_module = graph_module
        self.nodes = tuple(iter_nodes(graph_module.graph))
        self.position = {node: place for place, node in enumerate(self.nodes)}
        self.modules: dict[str, nn.Module] = modules_by_name(graph_module)
        self._attributes: dict[str, object] = {}

    def module_of(self, node: Node) -> nn.Module | None:
        """Return the module that a ``call_module`` node calls; None for other nodes."""
        return self.modules.get(str(node.target)) if node.op == "call_module" else None

    def attribute_of(self, node: Node) -> object | None:
        """Return what a ``get_attr`` node reads; None for other nodes, and where nothing is there."""
        if node.op != "get_attr":
            return None
        target = str(node.target)
        if target not in self._attributes:
            owner, _, name = target.rpartition(".")
            self._attributes[target] = getattr(self.modules.get(owner), name, None)
        return self._attributes[target]

    def forget(self, name: str) -> None:
        """Let go of a module or tensor that was taken out of the graph module, so that its memory can be freed."""
        self.modules.pop(name, None)
        self._attributes.pop(name, None)

    def tensor_of(self, node: Node) -> Tensor | None:
        """Return the tensor that a ``get_attr`` node reads; None for other nodes."""
        value = self.attribute_of(node)
        return value if isinstance(value, Tensor) else None

    @cached_property
    def effects(self) -> Effects:
        """What the nodes write and what may share memory."""
        return Effects(self.graph_module, self.modules)

    @cached_property
    def _same_values(self) -> SameValues:
        index = weakref.proxy(self)  # so that nothing of the graph module waits for the garbage collector
        return SameValues(self.nodes, lambda: index.effects)

    def same_value(self, node: Node, reader: Node) -> Node:
        """Return the first node that makes the value which ``reader`` gets from ``node``.

        Most often that is the node itself. Where several nodes make one view of one value, as ``x.view(-1, 4)`` twice
        does, and nothing writes that value from the first of them up to the reader, it is the first.
        """
        return self._same_values.first(node, reader)

    @cached_property
    def training(self) -> bool:
        """Whether an operator that says so trains: the mode in which an export graph was captured."""
        return any(says_training(node) for node in self.nodes)

    @cached_property
    def _module_names(self) -> dict[int, list[str]]:
        names: dict[int, list[str]] = {}
        for name, module in self.modules.items():
            names.setdefault(id(module), []).append(name)
        return names

    def module_names(self, module: nn.Module) -> list[str]:
        """Return all full names of a module."""
        return self._module_names.get(id(module), [])

    @cached_property
    def _tensor_names(self) -> dict[int, list[str]]:
        names: dict[int, list[str]] = {}
        for prefix, module in self.modules.items():
            for held in (module._parameters, module._buffers):
                for name, tensor in held.items():
                    if tensor is not None:
                        names.setdefault(id(tensor), []).append(f"{prefix}.{name}" if prefix else name)
        return names

    def tensor_names(self, tensor: Tensor) -> list[str]:
        """Return all full names of a parameter or buffer; two for a tied one."""
        return self._tensor_names.get(id(tensor), [])

    @cached_property
    def _tied(self) -> set[int]:
        """The ids of registered tensors that have several names, or share memory with another one."""
        return self._overlapping() | {key for key, names in self._tensor_names.items() if len(names) > 1}

    def _overlapping(self) -> set[int]:
        """The ids of registered tensors that share memory with another registered tensor."""
        tensors = [t for m in self.modules.values() for held in (m._parameters, m._buffers) for t in held.values()]
        unique = {id(tensor): tensor for tensor in tensors if tensor is not None}
        storages = list(map(_storage_of, unique.values()))
        several = {storage for storage, count in Counter(storages).items() if count > 1 and storage is not None}
        sharing: dict[object, dict[int, Tensor]] = {storage: {} for storage in several}
        for storage, (key, tensor) in zip(storages, unique.items(), strict=True) if several else ():
            if storage in several:
                sharing[storage][key] = tensor
        found: set[int] = set()
        for group in sharing.values():
            found |= _overlapping_of(group)
        return found

    def is_tied(self, tensor: Tensor) -> bool:
        """Return whether a tensor has several names, or shares memory with another parameter or buffer."""
        return id(tensor) in self._tied

    @cached_property
    def _readers(self) -> dict[int, dict[Node, None]]:
        readers: dict[int, dict[Node, None]] = {}
        own: dict[int, list[Tensor]] = {}

        def tensors_of(module: nn.Module) -> list[Tensor]:
            if id(module) not in own:
                own[id(module)] = _all_tensors(module)
            return own[id(module)]

        for node in self.nodes:
            if node.op == "call_module":
                module = self.module_of(node)
                for tensor in () if module is None else tensors_of(module):
                    readers.setdefault(id(tensor), {})[node] = None
            elif node.op == "get_attr":
                value = self.attribute_of(node)
                tensors = tensors_of(value) if isinstance(value, nn.Module) else [value]
                for each in tensors:
                    if isinstance(each, Tensor):
                        readers.setdefault(id(each), {}).update(node.users)
        return readers

    def readers(self, tensor: Tensor) -> dict[Node, None]:
        """Return the nodes that read a tensor: calls of modules that hold it, users of ``get_attr`` nodes on it."""
        return self._readers.get(id(tensor), _NO_NODES)

    @cached_property
    def _attribute_nodes(self) -> dict[str, list[Node]]:
        nodes: dict[str, list[Node]] = {}
        for node in self.nodes:
            if node.op == "get_attr":
                nodes.setdefault(str(node.target), []).append(node)
        return nodes

    def attribute_nodes(self, name: str) -> list[Node]:
        """Return the ``get_attr`` nodes with this target."""
        return self._attribute_nodes.get(name, [])

    def refuse(self, site: str, reason: str, message: str, *nodes: Node) -> Refusal:
        """Return a refusal that names the nodes of a site."""
        return Refusal(site, reason, message, tuple(node.name for node in nodes))


def _all_tensors(module: nn.Module) -> list[Tensor]:
    if module._modules:
        return [*module.parameters(), *module.buffers()]
    return [tensor for tensor in (*module._parameters.values(), *module._buffers.values()) if tensor is not None]


def _storage_of(tensor: Tensor) -> object | None:
    """Return the memory of a tensor, or None where it has none that could be shared."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided  # lazy ones have no sizes
    return None if not plain or tensor.is_meta or tensor.numel() == 0 else tensor.untyped_storage()._cdata


def _overlapping_of(tensors: Mapping[int, Tensor]) -> set[int]:
    """Return the keys of those tensors of one memory that share a part of it with another."""
    found: set[int] = set()
    end, owner = -1, -1
    for start, stop, key in sorted((*_extent_of(tensor), key) for key, tensor in tensors.items()):
        if start < end:
            found |= {key, owner}
        if stop > end:
            end, owner = stop, key
    return found


def _extent_of(tensor: Tensor) -> tuple[int, int]:
    """Return the first byte of a tensor, and the one behind its last."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + int(extent) * tensor.element_size()
