"""`GraphIndex`: who reads what in one graph module, at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt_core import (
    Refusal,
    check_graph_module,
    iter_nodes,
)
from fxopt_rewrite.effects.analysis import Effects
from fxopt_rewrite.effects.modules import tensors_of
from fxopt_rewrite.ops.vocabulary import says_training

K = TypeVar("K")
V = TypeVar("V")


class GraphIndex:
    """Facts about one graph module, gathered in linear time; make a new index after edits.

    Attributes:
        graph_module: the module.
        nodes: its nodes, in order.
        position: the place of each node in that order.
        modules: its modules by full name; a module with two names is there twice.
    """

    def __init__(self, graph_module: GraphModule) -> None:
        check_graph_module(graph_module, "GraphIndex")
        self.graph_module = graph_module
        self.nodes = tuple(iter_nodes(graph_module.graph))
        self.position = {node: place for place, node in enumerate(self.nodes)}
        self.modules: dict[str, nn.Module] = dict(graph_module.named_modules(remove_duplicate=False))

    def module_of(self, node: Node) -> nn.Module | None:
        """Return the module that a ``call_module`` node calls; None for other nodes."""
        return self.modules.get(str(node.target)) if node.op == "call_module" else None

    def attribute_of(self, node: Node) -> object | None:
        """Return what a ``get_attr`` node reads; None for other nodes, and if nothing has its name."""
        if node.op != "get_attr":
            return None
        owner, _, name = str(node.target).rpartition(".")
        return getattr(self.modules.get(owner), name, None)

    def forget(self, name: str) -> None:
        """Drop a module that was removed from the graph module, so that its memory can be freed."""
        self.modules.pop(name, None)

    def tensor_of(self, node: Node) -> Tensor | None:
        """Return the tensor that a ``get_attr`` node reads; None for other nodes."""
        value = self.attribute_of(node)
        return value if isinstance(value, Tensor) else None

    @cached_property
    def effects(self) -> Effects:
        """What the nodes write, and what may share memory."""
        return Effects(self.graph_module)

    @cached_property
    def _returned(self) -> set[Node]:
        found = set(self.nodes[-1].all_input_nodes)
        for node in reversed(self.nodes):
            if node in found:
                found.update(self.effects.aliases(node))
        return found

    def is_returned(self, node: Node) -> bool:
        """Return whether the graph returns a node's value, or a value that may share its memory: a view, or its source.

        >>> def views(x):
        ...     y = x + 1
        ...     return y.view(-1), (x * 2).sum()
        >>> index = GraphIndex(torch.fx.symbolic_trace(views))
        >>> [node.name for node in index.nodes if index.is_returned(node)]
        ['add', 'view', 'sum_1']
        """
        return node in self._returned

    def is_written_after(self, node: Node, since: Node | None = None) -> bool:
        """Return whether a node's value is written in place later on, even through an alias, or a global mode changes.

        Args:
            node: the node that makes the value.
            since: the node after which writes count; ``node`` itself by default.
        """
        return self.effects.written_between(node, since or node, self.nodes[-1])

    @cached_property
    def training(self) -> bool:
        """Whether an export graph was captured in train mode, judged by the arguments of its operators."""
        return any(says_training(node) for node in self.nodes)

    @cached_property
    def in_train_mode(self) -> bool:
        """Whether the graph module is in train mode; False for those of ``torch.export``, whose flag is always set."""
        # `ExportedProgram.module()` sets `train` on the instance, to a function that raises.
        return self.graph_module.training and "train" not in vars(self.graph_module)

    @cached_property
    def _module_names(self) -> dict[int, list[str]]:
        return _grouped((id(module), name) for name, module in self.modules.items())

    def module_names(self, module: nn.Module) -> list[str]:
        """Return all full names of a module."""
        return self._module_names.get(id(module), [])

    def _tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the parameters and buffers by full name, tied ones once for each of their names."""
        for owner, module in self.graph_module.named_modules(remove_duplicate=False):  # as edited
            for name, tensor in (*module._parameters.items(), *module._buffers.items()):
                if tensor is not None:
                    yield f"{owner}.{name}" if owner else name, tensor

    @cached_property
    def _tensor_names(self) -> dict[int, list[str]]:
        return _grouped((id(tensor), name) for name, tensor in self._tensors())

    def tensor_names(self, tensor: Tensor) -> list[str]:
        """Return all full names of a parameter or buffer; a tied one has several."""
        return self._tensor_names.get(id(tensor), [])

    @cached_property
    def _tied(self) -> set[int]:
        """The ids of registered tensors that have several names, or share memory with another one."""
        named = {key for key, names in self._tensor_names.items() if len(names) > 1}
        sharing = _grouped((_storage_of(tensor), tensor) for _, tensor in self._tensors())
        sharing.pop(None, None)
        return named.union(*(_overlapping_of(group) for group in sharing.values() if len(group) > 1))

    def is_tied(self, tensor: Tensor) -> bool:
        """Return whether a tensor has several names, or shares memory with another parameter or buffer."""
        return id(tensor) in self._tied

    @cached_property
    def _readers(self) -> dict[int, dict[Node, None]]:
        readers: dict[int, dict[Node, None]] = {}
        for node in self.nodes:
            value = self.module_of(node) if node.op == "call_module" else self.attribute_of(node)
            using: Iterable[Node] = node.users if node.op == "get_attr" else (node,)
            # A module that tracing did not enter may read whatever its children hold.
            for tensor in tensors_of(value) if isinstance(value, nn.Module) else [value]:
                if isinstance(tensor, Tensor):
                    readers.setdefault(id(tensor), {}).update(dict.fromkeys(using))
        return readers

    def readers(self, tensor: Tensor) -> dict[Node, None]:
        """Return the nodes that read a tensor: calls of modules that hold it, and users of its ``get_attr`` nodes."""
        return self._readers.get(id(tensor), {})

    @cached_property
    def _attribute_nodes(self) -> dict[str, list[Node]]:
        return _grouped((str(node.target), node) for node in self.nodes if node.op == "get_attr")

    def attribute_nodes(self, name: str) -> list[Node]:
        """Return the ``get_attr`` nodes with this target."""
        return self._attribute_nodes.get(name, [])

    def refuse(self, site: str, reason: str, message: str, *nodes: Node) -> Refusal:
        """Return a refusal that names the nodes of a site."""
        return Refusal(site, reason, message, tuple(node.name for node in nodes))


def _grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def _storage_of(tensor: Tensor) -> object | None:
    """Return a key for the memory of a tensor; None if it has none that could be shared."""
    plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout == torch.strided  # lazy ones have no sizes
    return None if not plain or tensor.is_meta or tensor.numel() == 0 else tensor.untyped_storage()._cdata


def _overlapping_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return the ids of those tensors in one storage that overlap with another."""
    found: set[int] = set()
    # By where they start: `end` is the furthest byte so far, and `owner` the tensor that reaches it.
    end, owner = -1, -1
    for start, stop, key in sorted((*_extent_of(tensor), id(tensor)) for tensor in tensors):
        if start < end:
            found |= {key, owner}
        if stop > end:
            end, owner = stop, key
    return found


def _extent_of(tensor: Tensor) -> tuple[int, int]:
    """Return the offsets in a tensor's storage of its first byte, and of the byte after its last."""
    extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = int(tensor.storage_offset()) * tensor.element_size()
    return start, start + int(extent) * tensor.element_size()
