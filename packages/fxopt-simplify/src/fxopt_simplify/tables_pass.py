"""Find the parts of a graph that depend only on sizes, literals, buffers and weights; `ShapeTables` computes them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, ClassVar

import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node

from fxopt_core import Refusal
from fxopt_rewrite import (
    MEMORY_FREE,
    Editor,
    GraphIndex,
    Kind,
    LayerNormCall,
    LinearCall,
    ReversibleSitePass,
    input_of,
    is_plain_method,
    plain_name,
    read_layer_norm,
    read_linear,
    replacement_refusal,
    words,
)
from fxopt_simplify.purity import Purity
from fxopt_simplify.shape_tables import BUFFER, LIKE, SIZE, ShapeTables

_LIKE = words("zeros_like ones_like full_like new_zeros new_ones new_full")
_MADE = _LIKE | words("arange full zeros ones eye scalar_tensor linspace")
_COMPUTED = words(
    """
    view view_as reshape reshape_as _unsafe_view unsqueeze squeeze expand expand_as broadcast_to slice select getitem
    narrow transpose permute t flatten unflatten movedim contiguous clone detach alias lift_fresh_copy repeat tile
    repeat_interleave chunk split meshgrid stack cat concat flip roll unbind to _to_copy type float half double bfloat16
    long int short bool add sub rsub mul div truediv floordiv floor_divide remainder mod neg abs pow reciprocal sqrt
    rsqrt exp exp2 log log2 log1p sin cos tan tanh sigmoid floor ceil round trunc sign clamp clamp_min clamp_max minimum
    maximum eq ne lt le gt ge and_ or_ xor invert __and__ __or__ __xor__ bitwise_and bitwise_or bitwise_xor bitwise_not
    logical_and logical_or logical_xor logical_not isin where masked_fill tril triu cumsum any all gather index
    index_select take_along_dim one_hot
    """
)
_REDUCED = words(
    """
    _weight_norm _weight_norm_interface norm linalg_vector_norm norm_except_dim var std var_mean std_mean mean sum amax
    amin batch_norm layer_norm linear addmm matmul mm bmm mv dot vdot einsum outer
    """
)
"""Sums and products. A weight that one of these computes is worth keeping; ``1 + weight`` is not, and norms read it."""
_KEPT = _MADE | _COMPUTED | _REDUCED
_READ_SIZES = words("size sym_size numel dim ndim nelement len sym_numel builtins.getattr builtins.len")
_FEWEST = 2


@dataclass(frozen=True, eq=False)
class TablesSite:
    """Tensors that one module is to compute.

    Attributes:
        outputs: the nodes that give them.
        inputs: what they depend on; parameters of layers by their full names.
        region: the nodes that compute them, in order.
        before: the first reader of one of them.
        graph: the computation.
        roles: what each input is to `ShapeTables`.
    """

    outputs: tuple[Node, ...]
    inputs: tuple[Node | str, ...]
    region: tuple[Node, ...]
    before: Node
    graph: Graph
    roles: tuple[str, ...]

    @property
    def label(self) -> str:
        """The name of the first tensor."""
        return self.outputs[0].name

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes whose values others read."""
        return self.outputs


class TablesPass(ReversibleSitePass[TablesSite]):
    """Base of the passes that let `ShapeTables` compute what no input tensor decides."""

    takes_sizes: ClassVar[bool]
    """Whether tensors may depend on sizes, dtypes and devices of others."""

    def match(self, index: GraphIndex) -> Iterator[TablesSite | Refusal]:
        """Yield groups of tensors that can be computed at one place of the graph."""
        tables = Tables(index, takes_sizes=self.takes_sizes)
        outputs: list[Output] = []
        for output in tables.outputs():
            node = output.node
            refusal = replacement_refusal(node.name, node, index) if tables.is_computed(node) else None
            if refusal is None:
                outputs.append(output)
            else:
                yield refusal
        kinds: dict[tuple[bool, bool], list[Output]] = {}  # apart, because a new size recomputes all of a module
        for output in outputs:
            kinds.setdefault(tables.weight_kind(output.node), []).append(output)
        for alike in kinds.values():
            for group in _groups(alike):
                site = tables.site(group)
                if site is not None:
                    yield site

    def rewrite(self, site: TablesSite, edit: Editor) -> None:
        """Insert one module, and erase what nothing reads any more."""
        tables = ShapeTables.of(site.graph, site.roles).train(edit.graph_module.training)
        name = edit.add_module("", "shape_tables", tables)
        inputs = [
            edit.undescribed(edit.get_attr(value, before=site.before, like=site.outputs))
            if isinstance(value, str)
            else value
            for value in site.inputs
        ]
        call = edit.call_module(name, *inputs, before=site.before, like=site.outputs)
        results = [call]
        if len(site.outputs) > 1:
            edit.undescribed(call)
            if all("val" in output.meta for output in site.outputs):
                call.meta["val"] = tuple(output.meta["val"] for output in site.outputs)
            results = [
                edit.call_function(operator.getitem, call, place, before=site.before, like=[output])
                for place, output in enumerate(site.outputs)
            ]
        for output, result in zip(site.outputs, results, strict=True):
            edit.replace(output, result)
        for node in reversed(site.region):
            if not edit.is_stale([node]) and not node.users:
                edit.erase(node)


@dataclass
class Output:
    """A tensor that others read, with the place of its last input and of its first reader."""

    node: Node
    last_input: int
    first_use: int


def _groups(outputs: list[Output]) -> Iterator[list[Output]]:
    """Group the tensors that can be computed after all of their inputs and before any of their readers."""
    group: list[Output] = []
    last_input = -1
    for output in sorted(outputs, key=lambda each: each.first_use):
        last_input = max(last_input, output.last_input)
        if group and last_input >= group[0].first_use:
            yield group
            group, last_input = [], output.last_input
        group.append(output)
    if group:
        yield group


@dataclass
class Tables:
    """The nodes of a graph that can be computed before it runs, once sizes are known; linear in its size."""

    index: GraphIndex
    takes_sizes: bool
    elementwise: bool = False  # whether ``1 + weight`` counts too
    _computed: dict[Node, int] = field(default_factory=dict)  # with the position of the last input from outside
    _sizes: set[Node] = field(default_factory=set)
    _weights: dict[Node, bool] = field(default_factory=dict)  # what parameters decide, with whether it is worth keeping
    _sized: set[Node] = field(default_factory=set)  # what sizes decide, of what is computed
    _layers: dict[Node, LinearCall | LayerNormCall] = field(default_factory=dict)  # of weights, as of positions
    _purity: Purity = field(init=False)

    def __post_init__(self) -> None:
        self._purity = Purity(self.index)
        for node in self.index.nodes:
            if self._is_size(node):
                self._sizes.add(node)
            elif self._is_layer(node):
                self._computed[node] = self._last_input(node.all_input_nodes[0])
                self._weights[node] = True
                if node.all_input_nodes[0] in self._sized:
                    self._sized.add(node)
            elif self._is_table(node):
                self._computed[node] = max([self._last_input(value) for value in node.all_input_nodes], default=-1)
                if any(value in self._sized or self._decides_size(value) for value in node.all_input_nodes):
                    self._sized.add(node)
                of_weights = [
                    value for value in node.all_input_nodes if value in self._weights or self._is_parameter(value)
                ]
                if of_weights:
                    reduced = self.elementwise or self.index.effects.effect(node).operation in _REDUCED
                    # What only repeats a weight to a size stays apart: the weight is computed once for all sizes.
                    alike = [value for value in of_weights if (value in self._sized) == (node in self._sized)]
                    self._weights[node] = reduced or any(self._weights.get(value) for value in alike)
        for node in reversed(self._weights):
            if (
                not self.elementwise
                and not self._weights[node]
                and not any(user in self._computed for user in node.users)
            ):
                del self._computed[node]  # so that what only sizes decide is still kept

    def _last_input(self, value: Node) -> int:
        return self._computed.get(value, self.index.position[value])

    def is_computed(self, node: Node) -> bool:
        """Return whether looking a node's value up may pay: more than one call makes it, or a weight is reduced."""
        if node in self._weights:
            return self._weights[node]
        return any(value in self._computed for value in node.all_input_nodes)

    def weight_kind(self, node: Node) -> tuple[bool, bool]:
        """Return whether parameters decide a node's value, and whether sizes do so, too."""
        return node in self._weights, node in self._weights and node in self._sized

    def _decides_size(self, value: Node) -> bool:
        return value not in self._computed and value.op != "get_attr"

    def _is_size(self, node: Node) -> bool:
        """Return whether a node gives a number, shape, dtype or device that sizes of tensors decide."""
        if self._purity.kind(node) not in MEMORY_FREE:
            return False
        if node.op == "placeholder":
            return self._purity.kind(node) is Kind.NUMBER
        if not self._purity.is_pure(node):
            return False
        name = self.index.effects.effect(node).operation
        return name in _READ_SIZES or all(value in self._sizes for value in node.all_input_nodes)

    def _is_table(self, node: Node) -> bool:
        if node.op not in ("call_function", "call_method") or not self._purity.is_pure(node):
            return False
        name = self.index.effects.effect(node).operation or ""
        plain = is_plain_method(node.target) if node.op == "call_method" else plain_name(node.target) is not None
        if not plain or name not in _KEPT:
            return False
        if self._purity.kind(node) not in (Kind.TENSOR, Kind.TENSORS):
            return False
        inputs = node.all_input_nodes
        if not inputs and name not in _MADE:
            return False
        if any(self._role(node, name, value) is None for value in inputs if value not in self._computed):
            return False
        return not self.index.effects.written_between(node, node, self.index.nodes[-1])

    def _is_layer(self, node: Node) -> bool:
        """Return whether a node calls a layer with what is computed, or with a weight."""
        value = input_of(node) if node.op == "call_module" else None
        if value is None or (value not in self._computed and not (value.op == "get_attr" and self._is_watched(value))):
            return False
        for read in (read_linear, read_layer_norm):
            call = read(self.index, node)
            if isinstance(call, LinearCall | LayerNormCall) and all(
                self._may_watch(ref.tensor) for ref in call.tensors
            ):
                self._layers[node] = call
                return not self.index.effects.written_between(node, node, self.index.nodes[-1])
        return False

    def _role(self, node: Node, name: str, value: Node) -> str | None:
        """Return the role of an outside input in `ShapeTables`; None if more of it matters than its size."""
        if value in self._sizes:
            return SIZE if self.takes_sizes else None
        if value.op == "get_attr":
            return BUFFER if self._is_watched(value) else None
        is_like = name in _LIKE and node.args[:1] == (value,) and self._purity.kind(value) is Kind.TENSOR
        fits = is_like and self.takes_sizes and value not in (*node.args[1:], *node.kwargs.values())
        return LIKE if fits else None

    def _is_watched(self, node: Node) -> bool:
        tensor = self.index.tensor_of(node)
        return tensor is not None and self._may_watch(tensor)

    def _may_watch(self, tensor: Tensor) -> bool:
        if type(tensor) not in (Tensor, nn.Parameter):
            return False
        if type(tensor) is Tensor and tensor.requires_grad:
            return False
        return not self.index.effects.tensor_written(tensor)

    def _is_parameter(self, node: Node) -> bool:
        return node.op == "get_attr" and isinstance(self.index.tensor_of(node), nn.Parameter)

    def outputs(self) -> Iterator[Output]:
        """Yield the tensors that others read."""
        for node, last_input in self._computed.items():
            is_read = any(user not in self._computed for user in node.users)
            if is_read and self._purity.kind(node) is Kind.TENSOR and self._weights.get(node, True):
                # Readers that are computed, too, stay where nothing or something outside reads them.
                yield Output(node, last_input, min(self.index.position[user] for user in node.users))

    def site(self, group: list[Output]) -> TablesSite | None:
        """Return the module for a group, or None if it would compute too little."""
        outputs = tuple(output.node for output in sorted(group, key=lambda each: self.index.position[each.node]))
        region = self.region(outputs)
        if outputs[0] not in self._weights and self._count_removed(region, outputs) < _FEWEST:
            return None
        roles: dict[Node | str, str] = {}
        for node in region:
            if node in self._layers:
                roles.update((ref.name, BUFFER) for ref in self._layers[node].tensors)
            name = self.index.effects.effect(node).operation or ""
            for value in node.all_input_nodes:
                if value not in self._computed:
                    role = BUFFER if node in self._layers else self._role(node, name, value)
                    assert role is not None  # else the node would not be in the region
                    if roles.setdefault(value, role) != role:
                        return None
        graph = graph_of(region, tuple(roles), outputs, self._layers)
        before = self.index.nodes[min(output.first_use for output in group)]
        return TablesSite(outputs, tuple(roles), region, before, graph, tuple(roles.values()))

    def region(self, outputs: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return the nodes that compute tensors, in order."""
        found, waiting = set(outputs), [*outputs]
        while waiting:
            for value in waiting.pop().all_input_nodes:
                if value in self._computed and value not in found:
                    found.add(value)
                    waiting.append(value)
        return tuple(sorted(found, key=self.index.position.__getitem__))

    def _count_removed(self, region: tuple[Node, ...], outputs: tuple[Node, ...]) -> int:
        removed = set(outputs)
        for node in reversed(region):
            if removed.issuperset(node.users):
                removed.add(node)
        return len(removed)


def graph_of(
    region: tuple[Node, ...],
    inputs: Sequence[Node | str],
    outputs: tuple[Node, ...],
    layers: Mapping[Node, LinearCall | LayerNormCall] = MappingProxyType({}),
) -> Graph:
    """Return the computation as a graph of its own, without the provenance of its nodes."""
    graph = Graph()
    copies: dict[Any, Node] = {value: graph.placeholder(f"input_{place}") for place, value in enumerate(inputs)}
    for node in region:
        if node in layers:
            copies[node] = _call_of(layers[node], graph, copies)
            continue
        copy = graph.node_copy(node, copies.__getitem__)
        copy.meta.clear()
        copy.type = None
        copies[node] = copy
    results: Any = tuple(copies[node] for node in outputs)
    graph.output(results if len(results) > 1 else results[0])
    return graph


def _call_of(call: LinearCall | LayerNormCall, graph: Graph, copies: Mapping[Any, Node]) -> Node:
    """Call the function of a layer; its tensors are inputs."""
    value = copies[call.input]
    weight, bias = (None if ref is None else copies[ref.name] for ref in (call.weight, call.bias))
    if isinstance(call, LinearCall):
        return graph.call_function(F.linear, (value, weight, bias))
    if call.centred:
        return graph.call_function(F.layer_norm, (value, call.normalized_shape, weight, bias, call.eps))
    return graph.call_function(F.rms_norm, (value, call.normalized_shape, weight, call.eps))
