"""The graph before passes, from the ledger: nodes that they added are removed, nodes that they removed return.

No tensor is touched, only names are copied, so that this works also for passes that cannot be undone.
"""

from __future__ import annotations

import sys
from contextlib import suppress

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node

from fxopt_core import FxoptError, Record, Transformation, iter_nodes, known_class, ledger_of, tag_of
from fxopt_report.drawn import DrawnGraph, drawn, module_texts
from fxopt_report.node_text import text_of
from fxopt_rewrite import (
    EditVisitor,
    ModuleRemoved,
    ModuleRow,
    NodeAdded,
    NodeRemoved,
    NodeReplaced,
    TensorRow,
    Unresolved,
    edits_of,
    mapped,
    module_of,
    set_places,
)


def graph_before(graph_module: GraphModule) -> tuple[DrawnGraph | None, tuple[str, ...]]:
    """Return the graph before the passes that are applied, and notes on what the ledger does not record.

    The ledger goes back to the last edit that a pass or something else made directly: this is the graph after it, or
    None where nothing was recorded since.
    """
    records = [record for record in ledger_of(graph_module).records if record.state == "applied" and record.changed]
    former, known = _FormerGraph(graph_module), None
    for record in reversed(records):
        try:
            former.take_back(record)
        except _UnknownError as error:
            note = (
                f"The graph before `{record.pass_name}` is not known: {error}. "
                f"{'Shown is the graph after it' if known else 'Only the graph after it is shown'}; "
                "give the original graph module to see it."
            )
            return known, (note,)
        known = former.drawn()  # what the next record leaves half done if it does not fit
    return former.drawn(), ()


class _UnknownError(FxoptError):
    """The ledger does not say what was there before."""


class _FormerGraph(EditVisitor):
    """A copy of a graph, on which records are taken back, the latest first."""

    def __init__(self, graph_module: GraphModule) -> None:
        self._modules = module_texts(graph_module)
        self._graph = Graph()
        # By number in the ledger. Several nodes have one number where a node's `meta` was copied to others.
        self._by_number: dict[int, list[Node]] = {}
        copies: dict[Node, Node] = {}
        for node in iter_nodes(graph_module.graph):
            copies[node] = self._graph.node_copy(node, copies.__getitem__)
            self._note(copies[node], node.name, tag_of(node).id)

    def drawn(self) -> DrawnGraph:
        """Return the graph as it is by now."""
        return drawn(self._graph, self._modules)

    def take_back(self, record: Record) -> None:
        """Take the edits of a record back.

        Raises:
            _UnknownError: It has none, or the graph was changed since.
        """
        if record.journal is None:
            cls = known_class(record.transformation)
            if cls is not None and issubclass(cls, Transformation) and cls.replaces_code_generator:
                return  # it left the graph as it was
            raise _UnknownError("the pass edited the graph by itself, and no record says how")
        for edit in reversed(edits_of(record)):
            edit.accept(self)

    def module_removed(self, edit: ModuleRemoved) -> None:
        """Add the description of the module again."""
        self._modules[edit.row.name] = _description(edit.row)

    def _note(self, node: Node, name: str, number: int | None) -> None:
        node.name = name
        if number is not None:
            self._by_number.setdefault(number, []).append(node)

    def _node(self, number: int, name: str = "") -> Node:
        found = self._by_number.get(number, [])
        named = [node for node in found if node.name == name] or found
        if len(named) != 1:
            raise _UnknownError(f"node {name or number!r} that it refers to was removed or copied since")
        return named[0]

    def node_added(self, edit: NodeAdded) -> None:
        """Remove the node."""
        row = edit.row
        node = self._node(row.id, row.name)
        if node.users:
            raise _UnknownError(f"node `{node.name}` is read by something that did not exist then")
        self._graph.erase_node(node)
        self._by_number[row.id].remove(node)

    def node_removed(self, edit: NodeRemoved) -> None:
        """Insert the node."""
        row = edit.row
        known = row.target, row.args, dict(row.kwargs)
        target, args, kwargs = mapped(known, lambda ref: self._node(ref.id), _Named)
        former = [] if row.previous is None else self._by_number.get(row.previous, [])
        first = next(iter_nodes(self._graph), None)
        with self._graph.inserting_after(former[0]) if former else self._graph.inserting_before(first):
            node = self._graph.create_node(row.op, target, args, kwargs, row.name)
        node.meta = dict(row.meta)
        self._note(node, row.name, row.id)

    def node_replaced(self, edit: NodeReplaced) -> None:
        """Let users read the old node again."""
        old, new = self._node(edit.old), self._node(edit.new)
        if edit.places is None:
            new.replace_all_uses_with(old)
            return
        for number, places in edit.places:
            for user in self._by_number.get(number, []):
                set_places(user, places, new, old)


class _Named:
    """A function or class of which only the name is known; callable, as torch.fx requires."""

    def __init__(self, value: Unresolved) -> None:
        self._name = value.name.replace(":", ".").removeprefix("torch.ops.")
        self.__name__ = self._name.removesuffix(".default").rpartition(".")[2]

    def __repr__(self) -> str:
        return self._name

    def __call__(self) -> None:
        """Nothing calls it."""


def _description(row: ModuleRow) -> str:
    """Return class and settings of a removed module, from its row."""
    module, _, path = row.cls.partition(":")
    name = path.rpartition(".")[2]
    # Only classes of torch: what else the ledger of a stranger names is not called.
    if module.startswith("torch.nn.modules."):
        with suppress(Exception):  # a class of another version
            return f"{name}({module_of(row, getattr(sys.modules[module], name), _on_meta).extra_repr()})"
    settings = (f"{key}={text_of(value)}" for key, value in row.attributes if isinstance(value, (int, float, str)))
    return f"{name}({', '.join(settings)})"


def _on_meta(row: TensorRow) -> nn.Parameter | None:
    # A parameter that was None, such as a missing bias, has neither dtype nor shape.
    absent = row.dtype is None and not row.shape
    return None if absent else nn.Parameter(torch.empty(row.shape, device="meta"), requires_grad=False)
