"""`Editor`: the named operations by which a pass edits a graph module.

Every operation is recorded, so that it can be undone from the ledger alone, in another process too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from types import MappingProxyType
from typing import Any

from torch import Tensor, nn
from torch.fx import Node
from torch.fx.node import map_arg

from fxopt_core.calls import ParameterisedCall
from fxopt_core.containers import emptied_row
from fxopt_core.dead_code import dead_nodes
from fxopt_core.graph import TargetNodes
from fxopt_core.graph_building import insert_node, source_note
from fxopt_core.index import GraphIndex
from fxopt_core.key_order import KeyOrders
from fxopt_core.known_classes import class_path
from fxopt_core.ledger import (
    Derived,
    ModuleAdded,
    ModuleRemoved,
    ModuleRow,
    Neutral,
    NodeAdded,
    NodeRemoved,
    NodeReplaced,
    NodeRow,
    Operation,
    Piece,
    Ref,
    Refusal,
    Rewrite,
    TensorRemoved,
    TensorRow,
    UsersOrdered,
)
from fxopt_core.ledger_rows import frozen
from fxopt_core.marks import META_KEY, NodeTag, tag_of
from fxopt_core.module_state import is_plain_data, plain_attributes
from fxopt_core.name_counts import NameCounts
from fxopt_core.recording import signature_or_empty
from fxopt_core.rewiring import Rewiring, places_of
from fxopt_core.runs import Frame, current_frame, release_for
from fxopt_core.transformation import Transformation
from fxopt_core.values import VALUE_KEYS, Resized

_NEVER_RECORDED = frozenset({META_KEY, *VALUE_KEYS})


class Editor:
    """Edits one graph module for one run of one pass.

    Nodes that an earlier site replaced are followed: arguments may name them, and `current` says what stands for them.

    Attributes:
        index: facts about the graph module, from before the edits.
    """

    def __init__(self, index: GraphIndex, transformation: Transformation) -> None:
        self.index = index
        self.graph_module = index.graph_module
        self.graph = index.graph_module.graph
        signature = signature_or_empty(transformation)
        self._marks, self._name = (signature,) if signature else (), transformation.name
        self._frame = current_frame(index.graph_module) or Frame(index.graph_module)
        self._frame.operations = [] if self._frame.operations is None else self._frame.operations
        self._ids: dict[Node, int] = {}
        self._replaced: dict[Node, Node] = {}
        self._erased: set[Node] = set()
        self._dead = dead_nodes(index.nodes)
        self._orders = KeyOrders()
        self._labels: dict[tuple[str, str], int] = {}
        self._targets: TargetNodes | None = None
        self._noted: set[Node] = set()
        self._noted_inputs: set[Node] = set()
        self._counts, self._rewiring, self._resized = NameCounts(self.graph), Rewiring(), Resized()
        self._frame.closing.append(self._rewiring.flush)
        self._site: list[list[str]] = [[], [], [], []]

    @property
    def operations(self) -> list[Operation]:
        """What was done so far."""
        assert self._frame.operations is not None
        return self._frame.operations

    # -- sites ---------------------------------------------------------------------------------------------------

    def refuse(self, refusal: Refusal) -> None:
        """Record that a site is left alone."""
        self._frame.refusals.append(refusal)

    @contextmanager
    def site(self, name: str) -> Iterator[None]:
        """Record what is done inside the ``with`` block as one rewrite of the site with this name."""
        self._site, self._note = [[], [], [], []], ""
        yield
        before, after, gone, new = map(tuple, self._site)
        self._frame.rewrites.append(Rewrite(name, before, after, gone, new, self._note))

    def note(self, text: str) -> None:
        """Record a sentence beside the rewrite of the site that is being rewritten."""
        self._note = text

    def derived(self, derived: Derived) -> None:
        """Record how new tensors follow from original ones."""
        self._frame.derived.append(derived)

    def neutral(self, piece: Piece, value: float = 0.0) -> None:
        """Record a region of a new tensor that no original has."""
        self.operations.append(Neutral(piece, value))

    # -- nodes ---------------------------------------------------------------------------------------------------

    def current(self, node: Node) -> Node:
        """Return the node that stands for a node that was replaced; the node itself where it was not."""
        while node in self._replaced:
            node = self._replaced[node]
        return node

    def is_stale(self, nodes: Iterable[Node]) -> bool:
        """Return whether an earlier site took one of these nodes out."""
        return any(node in self._erased for node in nodes)

    def call_module(
        self, name: str, *args: Any, before: Node, like: Sequence[Node], last_dim: int | None = None
    ) -> Node:
        """Insert a call of a module; see `call_function` for the other parameters."""
        return self._insert("call_module", name, args, {}, before, like, like[0], last_dim)

    def call_function(
        self,
        function: Callable[..., Any],
        *args: Any,
        before: Node,
        like: Sequence[Node],
        value_of: Node | None = None,
        last_dim: int | None = None,
        **kwargs: Any,
    ) -> Node:
        """Insert a call of a function.

        Args:
            function: what to call.
            args: its arguments; nodes that were replaced are followed.
            before: the node to insert it before.
            like: the nodes that it stands for; the first one gives the ``meta``.
            value_of: the node whose value its own is like; the first of ``like`` by default.
            last_dim: size of the last dimension of its value, where that differs from that one's.
            kwargs: its keyword arguments.

        Returns:
            The new node, marked as transformed.
        """
        return self._insert("call_function", function, args, kwargs, before, like, value_of or like[0], last_dim)

    def call_method(self, name: str, *args: Any, before: Node, like: Sequence[Node]) -> Node:
        """Insert a call of a method of its first argument; see `call_function` for the other parameters."""
        return self._insert("call_method", name, args, {}, before, like, like[0], None)

    def _insert(
        self,
        op: str,
        target: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        before: Node,
        like: Sequence[Node],
        value_of: Node,
        last_dim: int | None,
    ) -> Node:
        if before in self._erased:
            raise ValueError(f"node `{before.name}` was taken out already; insert before a node that is still there")
        args, kwargs = map_arg(args, self._now_used), map_arg(kwargs, self._now_used) if kwargs else {}
        node = insert_node(self.graph, before, op, target, args, kwargs)
        meta = node.meta
        meta.clear()
        meta.update(like[0].meta)
        meta["from_node"] = [source_note(each, self._name) for each in like]
        if last_dim is not None:
            for key in VALUE_KEYS:
                meta.pop(key, None)
            meta.update(self._resized.entries(value_of, last_dim))
        name = node.name
        origin = (self._name, tuple([each.name for each in like]))
        number = self._ids[node] = self._frame.new_id()
        meta[META_KEY] = NodeTag(number, self._marks, origin, name)
        if self._targets is not None:
            self._targets.add(node)
        self.operations.append(NodeAdded(self._row(node, with_meta=False), self._counts.before(name)))
        self._site[1].append(node.name)
        return node

    def replace(self, node: Node, replacement: Node) -> None:
        """Let all users of a node read its replacement, and take the node out."""
        for each in (node, replacement):
            self._note_users(each)
        for user in node.users:
            self._note_inputs(user)
        places = self._places(node) if replacement.users else None
        self.operations.append(NodeReplaced(self._id(node), self._id(replacement), places, node in self._dead))
        self._rewiring.redirect(node, replacement)
        self._replaced[node] = replacement
        self.erase(node)

    def _places(self, node: Node) -> tuple[tuple[int, tuple[int, ...]], ...]:
        return tuple((self._id(user), places) for user, places in places_of(node, self._rewiring))

    def erase(self, node: Node) -> None:
        """Take a node without users out of the graph."""
        row = self._row(node, with_meta=True)
        self._note_inputs(node)
        self.graph.erase_node(node)
        self._erased.add(node)
        if self._targets is not None:
            self._targets.discard(node)
        self.operations.append(NodeRemoved(row))
        self._site[0].append(node.name)

    def _note_inputs(self, user: Node) -> None:
        """Record the order of users of all that a node reads: it becomes the last of them when its arguments change."""
        if user not in self._noted_inputs:
            self._noted_inputs.add(user)
            for value in user._input_nodes:
                self._note_users(value)

    def _note_users(self, node: Node) -> None:
        """Record the order of a node's users before they change for the first time; most often it is the graph's."""
        if node in self._noted:
            return
        self._noted.add(node)
        users = list(node.users)
        if len(users) > 1 and any(later < earlier for earlier, later in pairwise(users)):
            self.operations.append(UsersOrdered(self._id(node), tuple(map(self._id, users))))

    def _now_used(self, node: Node) -> Node:
        """Return the node that stands for one that is about to be used, with the order of its users recorded."""
        node = self.current(node)
        self._note_users(node)
        return node

    def _id(self, node: Node) -> int:
        number = self._ids.get(node)
        if number is None:
            self._frame.start_ids()
            tag = tag_of(node)
            number = tag.id
            if number is None:
                number = self._frame.new_id()
                node.meta[META_KEY] = NodeTag(number, tag.marks, tag.origin, node.name, tag.ledger)
            self._ids[node] = number
        return number

    def _ref(self, node: Node) -> Any:
        return Ref(self._id(node))

    def _row(self, node: Node, *, with_meta: bool) -> NodeRow:
        self._rewiring.flush(node)
        args: Any = map_arg(node.args, self._ref)
        kwargs: Any = tuple(map_arg(node.kwargs, self._ref).items()) if node.kwargs else ()
        number, previous = self._id(node), node.prev
        before = None if previous.op == "root" else self._id(previous)
        if not with_meta:
            return NodeRow(number, node.op, node.target, args, kwargs, node.name, node.type, before)
        meta = {k: v for k, v in node.meta.items() if k not in _NEVER_RECORDED and not isinstance(v, Tensor)}
        tag = tag_of(node)
        if tag.ledger is not None:
            tag = replace(tag, ledger=None)
        return NodeRow(
            number, node.op, node.target, args, kwargs, node.name, node.type, before, MappingProxyType(meta), tag
        )

    # -- modules -------------------------------------------------------------------------------------------------

    def add_module(self, beside: str, label: str, module: nn.Module) -> str:
        """Put a module in beside another one.

        Args:
            beside: full name of a module or tensor; the new module gets the same parent.
            label: what to call it; a number is added where the parent has such a name already.
            module: the module.

        Returns:
            Its full name.
        """
        parent_name = beside.rpartition(".")[0]
        parent = self.graph_module.get_submodule(parent_name)
        fresh, count = label, self._labels.get((parent_name, label), 0)
        while hasattr(parent, fresh):
            count += 1
            fresh = f"{label}_{count}"
        self._labels[parent_name, label] = count
        self._orders.of(parent._modules).append(fresh, module)
        name = f"{parent_name}.{fresh}" if parent_name else fresh
        tensors = {**module._parameters, **module._buffers}
        self.operations.append(ModuleAdded.of(name, class_path(type(module)), tensors))
        self._site[3].append(name)
        return name

    def drop_module(self, name: str, pieces: Mapping[str, Piece | None], *, twin: str | None = None) -> None:
        """Take a module out that nothing calls any more.

        Args:
            name: its full name.
            pieces: for each of its tensors by local name, where its values are now; None where they are gone.
            twin: full name of the module that stands for it.
        """
        self._check_unused("call_module", name)
        parent_name, _, key = name.rpartition(".")
        parent = self.graph_module.get_submodule(parent_name)
        module = parent._modules[key] or parent.get_submodule(key)
        rows = [self._tensor_row(name, local, t, True, pieces.get(local)) for local, t in module._parameters.items()]
        for local, buffer in module._buffers.items():
            persistent = local not in module._non_persistent_buffers_set
            rows.append(self._tensor_row(name, local, buffer, False, pieces.get(local), persistent))
        for tensor_row in rows:
            self._erase_attribute_nodes(tensor_row.name)
        attributes = tuple([(k, frozen(v)) for k, v in (("training", module.training), *plain_attributes(module))])
        previous = self._orders.of(parent._modules).remove(key)
        row = ModuleRow(name, class_path(type(module)), attributes, tuple(rows), previous, twin)
        self.operations.append(ModuleRemoved(row))
        self.index.forget(name)
        self._site[2].append(name)

    def _erase_attribute_nodes(self, name: str) -> None:
        """Take the nodes out that stand for a parameter or buffer, where nothing reads them any more."""
        for node in self.index.attribute_nodes(name):
            if node not in self._erased and not node.users:
                self.erase(node)

    def drop_tensor(self, name: str, piece: Piece | None) -> None:
        """Take a parameter or buffer out that nothing reads any more, with the nodes that stand for it.

        Args:
            name: its full name.
            piece: where its values are now; None where they are gone.
        """
        self._erase_attribute_nodes(name)
        self._check_unused("get_attr", name)
        owner_name, _, key = name.rpartition(".")
        owner = self.graph_module.get_submodule(owner_name)
        is_parameter, persistent = key in owner._parameters, key not in owner._non_persistent_buffers_set
        values: dict[str, Any] = owner._parameters if is_parameter else owner._buffers
        row = self._tensor_row(owner_name, key, values[key], is_parameter, piece, persistent)
        row = replace(row, previous=self._orders.of(values).remove(key))
        owner._non_persistent_buffers_set.discard(key)
        self.operations.append(TensorRemoved(row, emptied_row(self.graph_module, owner_name, self._orders.of)))
        self.index.forget(name)
        self._site[2].append(name)

    def drop(self, call: ParameterisedCall, pieces: Mapping[str, Piece | None], *, twin: str) -> None:
        """Take out what a replaced call used: its module, or else its parameters and buffers one by one.

        Args:
            call: the call.
            pieces: for each of its tensors by local name, where its values are now; absent where they are gone.
            twin: full name of the module that stands for it.
        """
        if call.module is not None:
            self.drop_module(call.module_name, pieces, twin=twin)
            return
        for ref in call.tensors:
            self.drop_tensor(ref.name, pieces.get(ref.key))

    def _check_unused(self, op: str, name: str) -> None:
        if self._targets is None:
            self._targets = TargetNodes(self.graph)
        for node in self._targets.of(op, name):
            raise ValueError(f"`{name}` is used by node `{node.name}` still; replace or erase that node first")

    def _tensor_row(
        self, owner: str, key: str, tensor: Tensor | None, is_parameter: bool, piece: Piece | None, keeps: bool = True
    ) -> TensorRow:
        name = f"{owner}.{key}" if owner else key
        if tensor is None:
            return TensorRow(name, None, (), is_parameter, keeps)
        if piece is not None:
            release_for(self.graph_module, tensor, piece)
        own = vars(tensor)
        attributes = tuple((key, value) for key, value in own.items() if is_plain_data(value)) if own else ()
        row = TensorRow(name, piece, tuple(tensor.shape), is_parameter, keeps, None, attributes, tensor.dtype)
        return row.laid_out_as(tensor)

    def finish(self) -> None:
        """Complete what waits: arguments of nodes with many inputs, and the next free number of a node in the ledger.

        A run does so at the end of a pass; elsewhere, do it before anything else reads the graph.
        """
        self._frame.flush()
