"""Regions of a graph whose images become channels last: where they begin, what they contain, where they end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch.fx import Node

from fxopt_cpu.operators.onednn import why_unsupported
from fxopt_cpu.passes.memory_formats import (
    CHANGES_STRIDES,
    CHOOSES_STRIDES,
    MAY_COPY,
    PRESERVES_FORMAT,
    format_of,
    is_ambiguous,
    reads_sizes,
)
from fxopt_rewrite import ConvolutionCall, GraphIndex, is_python_number, read_convolution, tensor_facts

Edge = tuple[Node, Node]


@dataclass
class Region:
    """Values connected by operations that preserve the memory format.

    Attributes:
        convolutions: its convolutions, in order.
        members: all nodes whose values may change their memory format.
        entries: (reader, value) where the value has to be converted to channels last.
        exits: (reader, value) where the value has to be converted back.
        problem: the in-place write that a conversion would break, or None.
    """

    convolutions: list[Node] = field(default_factory=list)
    members: list[Node] = field(default_factory=list)
    entries: list[Edge] = field(default_factory=list)
    exits: list[Edge] = field(default_factory=list)
    problem: str | None = None

    @property
    def conversions(self) -> int:
        """Number of values that are converted."""
        return len({value for _, value in self.entries}) + len({value for _, value in self.exits})


class Layouts:
    """The memory formats of a graph whose convolutions run channels last.

    If ``moving``, views and reductions inside a region may change their strides, too.
    """

    def __init__(self, index: GraphIndex, *, moving: bool) -> None:
        self._index, self._moving = index, moving
        self.wanting = self._find_wanting()
        self._parents: dict[Node, Node] = {}
        self._members: dict[Node, None] = {}
        self._already: dict[Node, None] = {}
        self._entries: dict[Edge, None] = {}
        self._exits: dict[Edge, None] = {}
        self._converted: dict[Node, Node] = {}
        self._problems: dict[Node, str] = {}
        self._end = index.nodes[-1]
        for node in index.nodes:
            self._visit(node)

    @property
    def stuck(self) -> list[Node]:
        """Members that would have to be converted back, but have neither of the two formats."""
        return [value for _, value in self._exits if format_of(value) is None]

    def regions(self) -> Iterator[Region]:
        """Yield the regions, in the order of their first convolutions."""
        found: dict[Node, Region] = {}
        for node in self._members:
            region = found.setdefault(self._find(node), Region())
            region.members.append(node)
            if self.wanting.get(node):
                region.convolutions.append(node)
        for edge in self._entries:
            found[self._find(edge[0])].entries.append(edge)
        for edge in self._exits:
            found[self._find(edge[1])].exits.append(edge)
        for node, problem in self._problems.items():
            region = found[self._find(node)]
            region.problem = region.problem or problem
        yield from (region for region in found.values() if region.convolutions)

    def _find_wanting(self) -> dict[Node, bool]:
        """Return the nodes that read channels last: True for convolutions, False for what only leads to them."""
        wanting: dict[Node, bool] = {}
        for node in reversed(self._index.nodes):
            if _works_channels_last(self._index, node):
                wanting[node] = True
            elif node.users and all(user in wanting for user in node.users):
                inputs = [value for value in node.all_input_nodes if _rank(value) == 4]
                keeps = self._index.effects.effect(node).operation in PRESERVES_FORMAT
                if keeps and len(inputs) == 1 and not self._index.effects.effect(node).writes and _rank(node) == 4:
                    wanting[node] = False
        return wanting

    def _visit(self, node: Node) -> None:
        changed = [value for value in node.all_input_nodes if value in self._members]
        image = self._image_of(node)
        here = node in self.wanting and image is not None and image not in self._members
        if here and image is not None and not self.is_channels_last(image):
            self._members[node] = None
            self._enter(node, image)
        operation = self._index.effects.effect(node).operation
        if image is not None and self.is_channels_last(image) and self._preserves_format(node, operation):
            self._already[node] = None
        if not changed:
            return
        if node.op == "output":
            self._leave(node, changed)
        elif reads_sizes(node, operation) or (node.op == "call_function" and is_python_number(node)):
            return
        elif operation in CHOOSES_STRIDES and not self._index.effects.effect(node).writes:
            self._check_copies(node, operation, changed)
        elif self._preserves_format(node, operation):
            self._members[node] = None
            for value in changed:
                self._join(value, node)
            self._check_copies(node, operation, changed)
            self._take_converted(node)
        else:
            self._leave(node, changed)

    def is_channels_last(self, value: Node) -> bool:
        """Return whether a value is channels last in the graph as it is."""
        return value in self._already or format_of(value) == "channels_last"

    def _image_of(self, node: Node) -> Node | None:
        images = [value for value in node.all_input_nodes if _rank(value) == 4 and value.op != "get_attr"]
        return images[0] if images else None

    def _preserves_format(self, node: Node, operation: str | None) -> bool:
        plain = None if operation is None else operation.removesuffix("_")
        return plain in PRESERVES_FORMAT or (self._moving and plain in CHANGES_STRIDES)

    def _enter(self, node: Node, image: Node) -> None:
        """Let a node read a converted value; all readers of one value share its conversion, and so their region."""
        self._entries[node, image] = None
        first = self._converted.setdefault(image, node)
        self._join(first, node)
        if self._index.effects.written_between(image, first, node):
            readers = f"node `{first.name}` and node `{node.name}`, which both read it"
            self._problems.setdefault(node, f"`{image.name}` is written between {readers}")

    def _take_converted(self, node: Node) -> None:
        """Let an operation on several images read those that are converted already."""
        for value in node.all_input_nodes:
            if value not in self._members and value in self._converted and not self._index.effects.effect(node).writes:
                self._enter(node, value)

    def _leave(self, node: Node, changed: list[Node]) -> None:
        """Let a reader that may depend on strides read the format that it read before."""
        effect = self._index.effects.effect(node)
        for value in changed:
            written = value in effect.writes
            if written or (value in effect.aliases and self._written_after(value, node)):
                found = f"node `{node.name}` writes `{value.name}`" if written else f"`{value.name}` is written later"
                message = f"{found}, but would have been replaced by a converted copy"
                self._problems.setdefault(value, message)
            facts = tensor_facts(value)
            if facts is None or not is_ambiguous(facts):
                self._exits[node, value] = None

    def _check_copies(self, node: Node, operation: str | None, changed: list[Node]) -> None:
        """Note where a view would become a copy, or a copy a view, and is written later."""
        for value in changed:
            if operation in MAY_COPY and self._written_after(value, node):
                message = f"`{value.name}` is written after node `{node.name}` has returned a view or a copy of it"
                self._problems.setdefault(value, message)

    def _written_after(self, value: Node, node: Node) -> bool:
        return self._index.effects.written_between(value, node, self._end)

    def _join(self, one: Node, other: Node) -> None:
        self._parents[self._find(one)] = self._find(other)

    def _find(self, node: Node) -> Node:
        while (parent := self._parents.get(node, node)) is not node:
            self._parents[node] = self._parents.get(parent, parent)
            node = parent
        return node


def _rank(node: Node) -> int | None:
    facts = tensor_facts(node)
    return None if facts is None else facts.rank


def _works_channels_last(index: GraphIndex, node: Node) -> bool:
    """Return whether a node is a 2-D convolution that oneDNN can compute."""
    call = read_convolution(index, node)
    if not isinstance(call, ConvolutionCall) or call.dims != 2 or call.transposed:
        return False
    weight = call.weight.tensor
    facts = tensor_facts(call.input, weight)
    return facts is not None and facts.rank == 4 and why_unsupported(weight.dtype, weight.device) is None
