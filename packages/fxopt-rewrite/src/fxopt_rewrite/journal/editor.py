"""`Editor`: the operations by which a pass edits a graph module.

Each is recorded, so that it can be undone from the ledger, even in another process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg

from fxopt_core import (
    META_KEY,
    RELEASED_FROM,
    Derived,
    NodeTag,
    PassRun,
    Refusal,
    Rewrite,
    Transformation,
    class_path,
    describe,
    editing_run,
    release,
    set_arguments,
    signature_or_empty,
    tag_of,
)
from fxopt_rewrite.calls.records import ParameterisedCall
from fxopt_rewrite.data.codec import FIELDS
from fxopt_rewrite.index import GraphIndex
from fxopt_rewrite.journal import edits
from fxopt_rewrite.journal.graph_edits import TargetNodes, source_note
from fxopt_rewrite.journal.journal import Edits
from fxopt_rewrite.journal.order import KeyOrders
from fxopt_rewrite.journal.rewiring import Rewiring, places_of
from fxopt_rewrite.layers import module_problem, plain_attributes
from fxopt_rewrite.shapes.infer import describe_values, fake_values
from fxopt_rewrite.shapes.meta import (
    VALUE_KEYS,
    resized_entries,
    strides_in,
    strides_of,
    value_entries,
    with_strides,
)

#: Entries of ``meta`` that rows leave out: a tag has a field of its own, and described values are tensors.
_NEVER_RECORDED = frozenset({META_KEY, *VALUE_KEYS})
_CONTAINER = class_path(nn.Module)


class Editor:
    """Edits one graph module during one run of one pass, and records every edit.

    Later sites may name nodes that earlier sites replaced: such arguments become their replacements, as by `current`.

    Attributes:
        index: facts about the graph module, from before the edits.
        edits: the edits so far, in order, including those of other editors of the same run.
    """

    def __init__(self, index: GraphIndex, transformation: Transformation) -> None:
        signature = signature_or_empty(transformation)
        self.index = index
        self.graph_module = index.graph_module
        self.graph = index.graph_module.graph
        self._name, self._marks = transformation.name, (signature,) if signature else ()
        self._run = editing_run(index.graph_module) or PassRun(transformation, index.graph_module)
        self.edits: list[edits.Edit] = [] if self._run.edits is None else self._run.edits
        self._run.edits = self.edits
        self._run.closing.append(self._close)
        self._note = ""
        self._ids: dict[Node, int] = {}
        self._replaced: dict[Node, Node] = {}
        self._erased: set[Node] = set()
        self._described_last: list[Node] = []
        self._restrided: list[int] = []
        self._labels: dict[tuple[str, str], int] = {}  # the last number given to a label beneath a parent
        self._targets = TargetNodes(self.graph)
        self._orders = KeyOrders()
        self._rewiring = Rewiring()

    def _close(self) -> None:
        self._rewiring.flush()
        if self._restrided:
            self.edits.append(edits.Restrided(tuple(self._restrided)))
            self._restrided.clear()
        self._run.journal = Edits(tuple(self.edits))
        waiting = [node for node in self._described_last if node not in self._erased and "val" not in node.meta]
        self._described_last.clear()
        if waiting:
            describe_values(self.graph_module, waiting, fake_values(self.graph))

    def refuse(self, refusal: Refusal) -> None:
        """Record why a site is left alone."""
        self._run.refusals.append(refusal)

    @contextmanager
    def site(self, name: str) -> Iterator[None]:
        """Record the edits inside the ``with`` block as one rewrite, of the site with this name."""
        first, self._note = len(self.edits), ""
        yield
        made = self.edits[first:]
        removed = tuple(edit.row.name for edit in edits.of_kind(made, edits.NodeRemoved))
        added = tuple(edit.row.name for edit in edits.of_kind(made, edits.NodeAdded))
        rows = [edit.row for edit in made if type(edit) is edits.ModuleRemoved or type(edit) is edits.TensorRemoved]
        gone = tuple(row.name for row in rows if isinstance(row, edits.TensorRow) or row.cls != _CONTAINER)
        new = tuple(edit.name for edit in edits.of_kind(made, edits.ModuleAdded))
        self._run.rewrites.append(Rewrite(name, removed, added, gone, new, self._note))

    def note(self, text: str) -> None:
        """Add a sentence to the rewrite of the current site."""
        self._note = text

    def derived(self, derived: Derived) -> None:
        """Record how new tensors are computed from original ones; it is checked when a checkpoint needs it."""
        self._run.derived.append(derived)

    def record(self, edit: edits.CustomEdit) -> None:
        """Record an edit of the pass's own kind, which the pass has just made.

        Raises:
            TypeError: Its class is not decorated with `fxopt_core.stored`, so that no ledger could hold it.
        """
        if type(edit) not in FIELDS.writers:
            raise TypeError(f"found {describe(edit)}, expected a frozen dataclass decorated with fxopt_core.stored")
        self.edits.append(edit)

    def neutral(self, piece: edits.Piece, value: float = 0.0) -> None:
        """Record that a region of a new tensor that no original fills holds a constant without effect on results."""
        self.edits.append(edits.Neutral(piece, value))

    def current(self, node: Node) -> Node:
        """Return the node that now stands for a node: its last replacement, or the node itself."""
        while node in self._replaced:
            node = self._replaced[node]
        return node

    def is_stale(self, nodes: Iterable[Node]) -> bool:
        """Return whether one of these nodes has been removed already."""
        return any(node in self._erased for node in nodes)

    def call_module(
        self, name: str, *args: Any, before: Node, like: Sequence[Node], last_dim: int | None = None
    ) -> Node:
        """Insert a call of a module; see `call_function` for the other parameters."""
        return _resize(self._insert("call_module", name, args, {}, before, like), like[0], last_dim)

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
            args: its arguments; replaced nodes are followed.
            before: the node to insert it before.
            like: the nodes that it replaces; its ``meta`` is that of the first.
            value_of: the node whose described value the new one copies; by default the first of ``like``.
            last_dim: size of the last dimension of its value, if it differs.
            kwargs: its keyword arguments; replaced nodes are followed.

        Returns:
            The new node, marked as transformed.
        """
        node = self._insert("call_function", function, args, kwargs, before, like)
        return _resize(node, value_of or like[0], last_dim)

    def get_attr(self, name: str, *, before: Node, like: Sequence[Node]) -> Node:
        """Insert a node that reads a parameter or buffer; see `call_function` for the other parameters."""
        return self._insert("get_attr", name, (), {}, before, like)

    def call_method(self, name: str, *args: Any, before: Node, like: Sequence[Node], **kwargs: Any) -> Node:
        """Insert a call of a method of its first argument; see `call_function` for the other parameters."""
        return self._insert("call_method", name, args, kwargs, before, like)

    def _insert(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], before: Node, like: Sequence[Node]
    ) -> Node:
        if before in self._erased:
            raise ValueError(f"node `{before.name}` was already removed; insert before a node that is still there")
        args, kwargs = map_arg(args, self.current), map_arg(kwargs, self.current) if kwargs else {}
        with self.graph.inserting_before(before):
            node = self.graph.create_node(op, target)
        set_arguments(node, args, kwargs)  # `create_node` would search them for symbolic numbers, for as long again
        meta = node.meta
        meta.clear()
        meta.update(like[0].meta)
        meta["from_node"] = [source_note(each, self._name) for each in like]
        number = self._ids[node] = self._run.new_id()
        origin = (self._name, tuple([each.name for each in like]))
        meta[META_KEY] = NodeTag(number, self._marks, origin, node.name)
        self._targets.add(node)
        self.edits.append(edits.NodeAdded(self._row(node, with_meta=False)))
        return node

    def undescribed(self, node: Node) -> Node:
        """Drop the description of a node's value, such as shape and strides, and return the node.

        It is computed at the end of the run, without guards on symbolic sizes, as far as the inputs are described.
        """
        self._described_last.append(node)
        for key in VALUE_KEYS:
            node.meta.pop(key, None)
        return node

    def restrided(self, node: Node, like: Node | str | None = None) -> Node:
        """Describe a value anew of which a rewrite changes the strides alone, and return the node.

        An undo describes it as before.

        Args:
            node: the node, new or not.
            like: a node that has these strides, such as the one of which this node is a slice; for an image, also
                "contiguous" or "channels_last". Without it, the strides are computed at the end of the run, as by
                `undescribed`, which takes longer.
        """
        value = node.meta.get("val")
        if value_entries(node):
            self._restrided.append(self._id(node))
        self.undescribed(node)
        whole = self.current(like).meta.get("val") if isinstance(like, Node) else None
        if isinstance(value, FakeTensor) and isinstance(whole, FakeTensor):
            node.meta["val"] = with_strides(value, whole.stride())
        elif isinstance(value, FakeTensor) and isinstance(like, str):
            node.meta["val"] = with_strides(value, strides_in(like, value.shape))
        return node

    def replace(self, node: Node, replacement: Node) -> None:
        """Let all users of a node read its replacement instead, and remove the node."""
        # If the replacement has users already, an undo must not redirect them, so the users of the node are listed.
        places = None
        if replacement.users:
            places = tuple((self._id(user), places) for user, places in places_of(node, self._rewiring))
        value, now = node.meta.get("val"), replacement.meta.get("val")
        if isinstance(value, FakeTensor) and value is not now and strides_of(value) != strides_of(now):
            self.edits.append(edits.Restrided((self._id(node),)))
        self.edits.append(edits.NodeReplaced(self._id(node), self._id(replacement), places))
        self._rewiring.redirect(node, replacement)
        self._replaced[node] = replacement
        self.erase(node)

    def erase(self, node: Node) -> None:
        """Remove a node without users from the graph."""
        row = self._row(node, with_meta=True)
        self.graph.erase_node(node)
        self._erased.add(node)
        self._targets.discard(node)
        self.edits.append(edits.NodeRemoved(row))

    def _id(self, node: Node) -> int:
        number = self._ids.get(node)
        if number is None:
            # Before the tag is read, since this drops the numbers that nodes of a graph without a ledger brought along.
            self._run.start_ids()
            tag = tag_of(node)
            number = tag.id
            if number is None:
                number = self._run.new_id()
                node.meta[META_KEY] = NodeTag(number, tag.marks, tag.origin, node.name)
            self._ids[node] = number
        return number

    def _ref(self, node: Node) -> Any:
        return edits.Ref(self._id(node))

    def _row(self, node: Node, *, with_meta: bool) -> edits.NodeRow:
        self._rewiring.flush(node)
        args: Any = map_arg(node.args, self._ref)
        kwargs: Any = tuple(map_arg(node.kwargs, self._ref).items()) if node.kwargs else ()
        number, previous = self._id(node), node.prev
        before = None if previous.op == "root" else self._id(previous)
        meta, tag = {}, None
        if with_meta:
            meta = {k: v for k, v in node.meta.items() if k not in _NEVER_RECORDED and not isinstance(v, Tensor)}
            tag = tag_of(node)
        return edits.NodeRow(
            number, node.op, node.target, args, kwargs, node.name, node.type, before, MappingProxyType(meta), tag
        )

    def add_module(self, beside: str, label: str, module: nn.Module) -> str:
        """Add a module beside another one and return its full name.

        Args:
            beside: full name of a module or tensor; the new module gets the same parent.
            label: its name within that parent; a number is appended if the name is taken.
            module: the module.
        """
        parent_name = beside.rpartition(".")[0]
        parent = _submodule(self.graph_module, parent_name)
        fresh, count = label, self._labels.get((parent_name, label), 0)
        # Any attribute counts: Python would find a method before a child of that name.
        while hasattr(parent, fresh):
            count += 1
            fresh = f"{label}_{count}"
        self._labels[parent_name, label] = count
        self._orders.of(parent._modules).append(fresh, module)
        name = f"{parent_name}.{fresh}" if parent_name else fresh
        tensors = {**module._parameters, **module._buffers}
        shapes = tuple([(key, None if tensor is None else tuple(tensor.shape)) for key, tensor in tensors.items()])
        dtypes = tuple([None if tensor is None else tensor.dtype for tensor in tensors.values()])
        self.edits.append(edits.ModuleAdded(name, class_path(type(module)), shapes, dtypes))
        return name

    def drop_module(self, name: str, pieces: Mapping[str, edits.Piece | None], *, twin: str | None = None) -> None:
        """Remove a module that no node calls any more, with the nodes that read its tensors.

        Args:
            name: its full name.
            pieces: for each of its tensors by local name, where its values are now; absent or None if they are gone.
            twin: full name of the module that replaces it, from which undo takes the training flag.

        Raises:
            ValueError: A node still calls it.
        """
        self._check_unused("call_module", name)
        parent_name, _, key = name.rpartition(".")
        parent = _submodule(self.graph_module, parent_name)
        module = _submodule(parent, key)
        tensors = (*module._parameters, *module._buffers)
        rows = tuple([self._tensor_row(name, module, local, pieces.get(local)) for local in tensors])
        for row in rows:
            self._erase_attribute_nodes(row.name)
        attributes = tuple(
            (key, edits.Listed(tuple(value)) if isinstance(value, list) else value)
            for key, value in (("training", module.training), *plain_attributes(module))
        )
        previous = self._orders.of(parent._modules).remove(key)
        removed = edits.ModuleRow(name, class_path(type(module)), attributes, rows, previous, twin)
        self.edits.append(edits.ModuleRemoved(removed))
        self.index.forget(name)

    def drop_unused(self, node: Node, twin: str | None = None) -> None:
        """Remove the module without tensors that a node called, unless another node calls it or it has two names.

        Args:
            node: the node.
            twin: full name of the module that replaces it, as for `drop_module`.
        """
        name = str(node.target)
        module = self.index.modules.get(name) if node.op == "call_module" else None
        if module is None or len(self.index.module_names(module)) > 1:
            return
        # A layer with weights stays, since an undo could not bring them back.
        tensors = any(True for _ in module.parameters()) or any(True for _ in module.buffers())
        if not tensors and not self._targets.of("call_module", name):
            self.drop_module(name, {}, twin=twin)

    def _erase_attribute_nodes(self, name: str) -> None:
        for node in self.index.attribute_nodes(name):
            if node not in self._erased and not node.users:
                self.erase(node)

    def drop_tensor(self, name: str, piece: edits.Piece | None) -> None:
        """Remove a parameter or buffer that nothing uses any more, with the nodes that read it.

        Args:
            name: its full name.
            piece: where its values are now; None if they are gone.

        Raises:
            ValueError: A node still uses it.
        """
        self._erase_attribute_nodes(name)
        self._check_unused("get_attr", name)
        owner_name, _, key = name.rpartition(".")
        owner = _submodule(self.graph_module, owner_name)
        row = self._tensor_row(owner_name, owner, key, piece)
        values: dict[str, Any] = owner._parameters if row.is_parameter else owner._buffers
        row = replace(row, previous=self._orders.of(values).remove(key))
        owner._non_persistent_buffers_set.discard(key)
        self.edits.append(edits.TensorRemoved(row))
        self.index.forget(name)
        # Containers that are empty now go, too: copies of torch would not have them.
        while owner_name and not self._targets.of("get_attr", owner_name):
            owner = _submodule(self.graph_module, owner_name)
            held = owner._parameters or owner._buffers or len(self.index.module_names(owner)) > 1
            if held or module_problem(owner, (nn.Module,)) is not None:
                return
            self.drop_module(owner_name, {})
            owner_name = owner_name.rpartition(".")[0]

    def drop(self, call: ParameterisedCall, pieces: Mapping[str, edits.Piece | None], *, twin: str) -> None:
        """Remove what only a replaced call used: its module, or its parameters and buffers one by one.

        A module without tensors that `drop_unused` has already removed is skipped.

        Args:
            call: the call.
            pieces: for each of its tensors by full or local name, where its values are now; absent if they are gone.
            twin: full name of the module that replaces it.

        Raises:
            ValueError: A node still uses one of them.
        """
        if call.module is not None:
            if call.tensors or call.module_name in self.index.modules:
                local = {name.rpartition(".")[2]: piece for name, piece in pieces.items()}
                self.drop_module(call.module_name, local, twin=twin)
            return
        for ref in call.tensors:
            self.drop_tensor(ref.name, pieces.get(ref.name, pieces.get(ref.key)))

    def _check_unused(self, op: str, name: str) -> None:
        for node in self._targets.of(op, name):
            raise ValueError(f"`{name}` is still used by node `{node.name}`; replace or erase that node first")

    def _tensor_row(self, owner_name: str, owner: nn.Module, key: str, piece: edits.Piece | None) -> edits.TensorRow:
        name = f"{owner_name}.{key}" if owner_name else key
        is_parameter, persistent = key in owner._parameters, key not in owner._non_persistent_buffers_set
        tensor: Tensor | None = owner._parameters[key] if is_parameter else owner._buffers[key]
        if tensor is None:
            return edits.TensorRow(name, None, (), is_parameter, persistent)
        if piece is not None:
            _release(self.graph_module, tensor, piece)
        shape, usual = tuple(tensor.shape), tensor.layout != torch.strided or tensor.is_contiguous()
        strides = None if usual else tuple(tensor.stride())
        return edits.TensorRow(name, piece, shape, is_parameter, persistent, None, tensor.dtype, strides)

    def finish(self) -> None:
        """Complete the arguments of nodes with many inputs, and note the next free node number in the ledger.

        A run does so after the pass; call it yourself if anything reads the graph earlier.
        """
        self._run.flush()


def _submodule(module: nn.Module, name: str) -> nn.Module:
    """Return what `get_submodule` does, in a tenth of its time."""
    for key in name.split("."):  # the dictionaries of script modules have no `get`
        module = (key in module._modules and module._modules[key]) or module.get_submodule(key)
    return module


def _resize(node: Node, value_of: Node, last_dim: int | None) -> Node:
    """Describe a node's value as that of another node, with this size of its last dimension unless that is None."""
    if last_dim is not None:
        for key in VALUE_KEYS:
            node.meta.pop(key, None)
        node.meta.update(resized_entries(value_of, last_dim))
    return node


def _release(graph_module: GraphModule, tensor: Tensor, piece: edits.Piece) -> None:
    """Free the memory of a large tensor that a rollback can cut out of the tensor that holds its values now."""
    if tensor.numel() * tensor.element_size() < RELEASED_FROM:
        return
    owner, _, key = piece.key.rpartition(".")
    source = getattr(_submodule(graph_module, owner), key).detach()
    # A piece that was cast has lost bits. Any other original is released, so that merging needs no second copy.
    if source.dtype == tensor.dtype:
        release(graph_module, tensor, lambda: piece.take(source).clone(memory_format=torch.contiguous_format))
