"""Find the parts of a graph that depend only on sizes, literals, buffers and weights; `ShapeTables` computes them."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, Node
from torch.fx.node import map_arg

from fxopt_core import Refusal
from fxopt_rewrite import (
    MEMORY_FREE,
    Editor,
    GraphIndex,
    Kind,
    ReversibleSitePass,
    TensorRef,
    input_of,
    is_plain_method,
    plain_name,
    read_operation,
    replacement_refusal,
    tensor_facts,
    words,
)
from fxopt_simplify.purity import FACTORIES, FACTORIES_LIKE, SAME_ELEMENTS, Purity
from fxopt_simplify.shape_tables import BUFFER, LIKE, SIZE, ShapeTables

_MADE = FACTORIES | FACTORIES_LIKE | {"tensor"}
_COMPUTED = SAME_ELEMENTS | words("""
    tile repeat_interleave chunk split meshgrid stack cat concat flip roll unbind to _to_copy type float half double
    bfloat16 long int short bool type_as add sub rsub mul div truediv floordiv floor_divide remainder mod neg abs pow
    reciprocal sqrt rsqrt exp exp2 log log2 log1p sin cos tan tanh sigmoid floor ceil round trunc sign clamp clamp_min
    clamp_max min minimum max maximum eq ne lt le gt ge and_ or_ xor invert __and__ __or__ __xor__ bitwise_and
    bitwise_or bitwise_xor bitwise_not logical_and logical_or logical_xor logical_not isin where masked_fill tril triu
    cumsum any all gather index index_select take_along_dim one_hot
""")
#: Sums, products, and lookups as of Swin's biases of attention. A weight that one of these computes is worth keeping;
#: ``1 + weight`` is not, and norms read it.
_REDUCED = words("""
    index index_select gather take_along_dim _weight_norm _weight_norm_interface norm linalg_vector_norm norm_except_dim
    var std var_mean std_mean mean sum amax amin batch_norm layer_norm linear addmm matmul mm bmm mv dot vdot einsum
    outer
""")
_KEPT = _MADE | _COMPUTED | _REDUCED
_READ_SIZES = words("size sym_size numel dim ndim nelement len sym_numel builtins.getattr builtins.len")
#: Calls that a lookup has to save at least: looking a small tensor up takes as long as making it by one call.
_FEWEST = 2


@dataclass(frozen=True, eq=False)
class TablesSite:
    """Tensors that one module is to compute.

    Attributes:
        outputs: the nodes that give them.
        inputs: what they depend on; parameters and buffers by their full names.
        region: the nodes that compute them, in order.
        before: the node before which they are computed.
        graph: the computation.
        roles: what each input is to `ShapeTables`.
        repeated: whether sizes make more of a weight of weights, which is kept beside it.
    """

    outputs: tuple[Node, ...]
    inputs: tuple[Node | str, ...]
    region: tuple[Node, ...]
    before: Node
    graph: Graph
    roles: tuple[str, ...]
    repeated: bool

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

    #: Whether tensors may depend on sizes, dtypes and devices of others.
    takes_sizes: ClassVar[bool]

    def match(self, index: GraphIndex) -> Iterator[TablesSite | Refusal]:
        """Yield groups of tensors that can be computed at one place of the graph."""
        tables = Tables(index, takes_sizes=self.takes_sizes)
        kinds: dict[tuple[bool, bool], list[Output]] = {}  # apart, because a new size recomputes all of a module
        for output in tables.outputs():
            node = output.node
            refusal = replacement_refusal(node.name, node, index) if tables.is_computed(node) else None
            if refusal is None:
                kinds.setdefault(tables.weight_kind(node), []).append(output)
            else:
                yield refusal
        for alike in kinds.values():
            yield from filter(None, map(tables.site, _groups(alike)))

    def enables_others(self, site: TablesSite) -> bool:
        """Return whether sizes repeat a weight of this table: another table may hold the result."""
        return site.repeated

    def rewrite(self, site: TablesSite, edit: Editor) -> None:
        """Insert one module, and erase what nothing reads any more."""
        read = [value for node in site.region for value in node.all_input_nodes if value.op == "get_attr"]
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
        for node in dict.fromkeys((*reversed(site.region), *read)):
            if not edit.is_stale([node]) and not node.users:
                edit.erase(node)


class Output(NamedTuple):
    """A tensor that others read, with the place of its last input and of its first reader."""

    node: Node
    last_input: int
    first_use: int


def _groups(outputs: list[Output]) -> Iterator[list[Output]]:
    """Group the tensors that can be computed after all of their inputs and before any of their readers."""
    group: list[Output] = []
    last_input = -1
    # In this order, the first of a group is the one that is read first.
    for output in sorted(outputs, key=lambda each: each.first_use):
        last_input = max(last_input, output.last_input)
        if group and last_input >= group[0].first_use:
            yield group
            group, last_input = [], output.last_input
        group.append(output)
    if group:
        yield group


class _Call(NamedTuple):
    """The form of a call in a table: layers call functions of their tensors, and nothing is written in place."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = MappingProxyType({})

    @property
    def tensors(self) -> tuple[TensorRef, ...]:
        """The tensors of the model among the arguments."""
        return tuple(each for each in self.args if isinstance(each, TensorRef))


class Tables:
    """The nodes of a graph that can be computed before it runs, once sizes are known; linear in its size."""

    def __init__(self, index: GraphIndex, *, takes_sizes: bool, elementwise: bool = False) -> None:
        self.index, self.takes_sizes = index, takes_sizes
        self.elementwise = elementwise  # whether ``1 + weight`` counts too
        self._computed: dict[Node, int] = {}  # with the position of the last input from outside
        self._sizes: set[Node] = set()
        self._weights: dict[Node, bool] = {}  # what parameters decide, with whether it is worth keeping
        self._sized: set[Node] = set()  # what sizes decide, of what is computed
        self._calls: dict[Node, _Call] = {}  # of layers, and of operations that write in place
        self._settled: dict[Node, bool] = {}  # of what is written later
        self._purity = Purity(index)
        for node in self.index.nodes:
            if self._is_size(node):
                self._sizes.add(node)
            elif self._is_layer(node):
                self._computed[node] = self._last_input(node.all_input_nodes[0])
                self._weights[node] = not self._looks_up(node)
                if node.all_input_nodes[0] in self._sized:
                    self._sized.add(node)
            elif self._is_table(node):
                inputs = node.all_input_nodes
                self._computed[node] = max([self._last_input(value) for value in inputs], default=-1)
                if any(each in self._sized or not (each in self._computed or each.op == "get_attr") for each in inputs):
                    self._sized.add(node)
                of_weights = [value for value in inputs if value in self._weights or self._is_parameter(value)]
                if of_weights:
                    # A lookup costs as much as finding its result; what is made of it is worth keeping.
                    reduced = self.elementwise or any(map(self._looks_up, of_weights))
                    reduced = reduced or self.index.effects.effect(node).operation in _REDUCED
                    # What only repeats a weight to a size stays apart: the weight is computed once for all sizes.
                    alike = [value for value in of_weights if (value in self._sized) == (node in self._sized)]
                    self._weights[node] = reduced or any(self._weights.get(value) for value in alike)
        for node in reversed(self._weights):
            if not (self.elementwise or self._weights[node] or any(user in self._computed for user in node.users)):
                del self._computed[node]  # so that what only sizes decide is still kept

    def _last_input(self, value: Node) -> int:
        # A parameter or buffer is read again where the table is computed.
        return self._computed.get(value, -1 if value.op == "get_attr" else self.index.position[value])

    def is_computed(self, node: Node) -> bool:
        """Return whether looking a node's value up may pay: more than one call makes it, or a weight is reduced."""
        if node in self._weights:
            return self._weights[node]
        return any(value in self._computed for value in node.all_input_nodes)

    def weight_kind(self, node: Node) -> tuple[bool, bool]:
        """Return whether parameters decide a node's value, and whether sizes do so, too."""
        return node in self._weights, node in self._weights and node in self._sized

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
        if node.op not in ("call_function", "call_method") or self._is_kept(node):
            return False
        name, target = self.index.effects.effect(node).operation or "", node.target
        written = self.index.effects.writes(node)
        overwrites = len(written) == 1 and written[0] in self._computed and self._overwriter(written[0]) is node
        # T5 and MPNet add up buckets of relative positions in place: a table computes such a sum as a new tensor.
        if overwrites:
            name, target = "add", torch.add
        elif not self._purity.is_pure(node):
            return False
        plain = is_plain_method(target) if isinstance(target, str) else plain_name(target) is not None
        if not plain or (name not in _KEPT and not self._looks_up(node)):
            return False
        if self._purity.kind(node) not in (Kind.TENSOR, Kind.TENSORS):
            return False
        inputs = node.all_input_nodes
        if not inputs and name not in _MADE:
            return False
        if any(self._role(node, name, value) is None for value in inputs if value not in self._computed):
            return False
        if overwrites:
            self._calls[node] = _Call(target, node.args, node.kwargs)
        return self._is_settled(node)

    def _looks_up(self, node: Node) -> bool:
        """Return whether a node takes rows of a table by indices."""
        return not self.elementwise and self.index.effects.effect(node).operation in ("embedding", "nn.Embedding")

    def _is_settled(self, node: Node) -> bool:
        """Return whether nothing writes a value later but calls that can compute a new tensor instead."""
        chain: list[Node] = []  # which is walked once: a part of it that is known tells of the others
        current: Node | None = node
        while current is not None and current not in self._settled and self._is_written(current):
            chain.append(current)
            current = self._overwriter(current)
        settled = current is not None and self._settled.get(current, True)
        self._settled.update(dict.fromkeys(chain, settled))
        return settled

    def _is_written(self, node: Node) -> bool:
        """Return whether a value may be written after its call."""
        return self.index.effects.written_between(node, node, self.index.nodes[-1])

    def _overwriter(self, node: Node) -> Node | None:
        """Return the call that adds to a value in place, if nothing else sees what it writes there."""
        *others, last = sorted(node.users, key=self.index.position.__getitem__) or (node,)
        call, facts = read_operation(self.index, last), [tensor_facts(each) for each in (node, last)]
        if call is None or not call.inplace or call.name != "add" or None in facts:
            return None
        operands = [tensor_facts(each) for each in last.all_input_nodes]
        alike = len({None if each is None else each.dtype for each in (*facts, *operands)}) == 1
        apart = not any(node in self.index.effects.aliases(each) for each in others)
        fits = alike and apart and not self.elementwise and self.index.effects.writes(last) == (node,)
        return last if fits else None

    def _is_layer(self, node: Node) -> bool:
        """Return whether a node calls a layer with what is computed, or with a weight."""
        value = input_of(node) if node.op == "call_module" else None
        if value is None or (value not in self._computed and not (value.op == "get_attr" and self._is_watched(value))):
            return False
        call = self._layer_call(node)
        if call is None or not all(self._may_watch(ref.tensor) for ref in call.tensors):
            return False
        self._calls[node] = call
        return not self._is_written(node)

    def _layer_call(self, node: Node) -> _Call | None:
        """Return the call of a function that a layer makes."""
        call = read_operation(self.index, node)
        if call is None or call.name not in ("linear", "layer_norm", "rms_norm", "embedding"):
            return None
        other_gradients = any(call.arguments.get(key) for key in ("scale_grad_by_freq", "sparse"))  # of embeddings
        if other_gradients or (call.name == "embedding" and self.elementwise):
            return None
        return _Call(getattr(F, call.name), tuple(call.arguments.values()))

    def _role(self, node: Node, name: str, value: Node) -> str | None:
        """Return the role of an outside input in `ShapeTables`; None if more of it matters than its size."""
        if value in self._sizes:
            return SIZE if self.takes_sizes else None
        # Watched, not folded, so that loading, training and undoing go on with the tensors of the model.
        if value.op == "get_attr":
            return BUFFER if self._is_watched(value) else None
        if self._is_kept(value):
            return BUFFER if self.takes_sizes and not self._is_written(value) else None
        # The first argument of ``ones_like``; as a fill value, say, its numbers would count, too.
        is_like = name in FACTORIES_LIKE and node.args[:1] == (value,) and self._purity.kind(value) is Kind.TENSOR
        fits = is_like and self.takes_sizes and value not in (*node.args[1:], *node.kwargs.values())
        return LIKE if fits else None

    def _is_kept(self, node: Node) -> bool:
        """Return whether a table was put in for a value before, as for a weight of weights that sizes repeat."""
        call = node.args[0] if node.target is operator.getitem else node
        return isinstance(call, Node) and isinstance(self.index.module_of(call), ShapeTables)

    def _is_watched(self, node: Node) -> bool:
        tensor = self.index.tensor_of(node)
        return tensor is not None and self._may_watch(tensor)

    def _may_watch(self, tensor: Tensor) -> bool:
        plain = type(tensor) is nn.Parameter or (type(tensor) is Tensor and not tensor.requires_grad)
        return plain and not self.index.effects.tensor_written(tensor)

    def _is_parameter(self, node: Node) -> bool:
        return node.op == "get_attr" and isinstance(self.index.tensor_of(node), nn.Parameter)

    def outputs(self) -> Iterator[Output]:
        """Yield the tensors that others read."""
        for node, last_input in self._computed.items():
            is_read = any(user not in self._computed for user in node.users)
            # A kept table must not be written: what is written later stays in the graph for those that read it.
            is_read = is_read and not self._is_written(node)
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
            tensors = self._calls[node].tensors if node in self._calls else ()
            roles.update((ref.name, BUFFER) for ref in tensors)
            name = self.index.effects.effect(node).operation or ""
            for value in node.all_input_nodes:
                if value not in self._computed:
                    role = BUFFER if tensors else self._role(node, name, value)
                    assert role is not None  # else the node would not be in the region
                    key = str(value.target) if value.op == "get_attr" else value
                    if roles.setdefault(key, role) != role:
                        return None
        graph = graph_of(region, tuple(roles), outputs, self._calls)
        # As early as its inputs allow, so that it cuts no layers apart; what nobody reads (checks, modes) stays first.
        place, first_use = max(output.last_input for output in group) + 1, min(output.first_use for output in group)
        before = self.index.nodes[first_use]
        for node in reversed(self.index.nodes[place:first_use]):
            if node.op == "placeholder" or not node.users:
                break
            before = before if node in self._computed or node.op == "get_attr" else node
        users = [user for node in self._weights.keys() & outputs for user in node.users]
        repeated = any(user in self._sized and user not in self._computed for user in users)
        return TablesSite(outputs, tuple(roles), region, before, graph, tuple(roles.values()), repeated)

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
        """Return how many nodes of a region go, counting those that only other tables read as going with these."""
        removed = set(outputs)
        for node in reversed(region):
            if all(user in removed or user in self._computed for user in node.users):
                removed.add(node)
        return len(removed)


def graph_of(
    region: tuple[Node, ...],
    inputs: Sequence[Node | str],
    outputs: tuple[Node, ...],
    calls: Mapping[Node, _Call] = MappingProxyType({}),
) -> Graph:
    """Return the computation as a graph of its own."""
    graph = Graph()
    copies: dict[Any, Node] = {value: graph.placeholder(f"input_{place}") for place, value in enumerate(inputs)}
    for node in region:
        function, args, kwargs = calls.get(node) or _Call(node.target, node.args, node.kwargs)
        op = "call_method" if isinstance(function, str) else "call_function"
        given: Any = map_arg((args, kwargs), lambda each: copies.get(each) or copies[each.target])
        args = tuple(copies[each.name] if isinstance(each, TensorRef) else each for each in given[0])
        copies[node] = graph.create_node(op, function, args, given[1])
    results: Any = tuple(copies[node] for node in outputs)
    graph.output(results if len(results) > 1 else results[0])
    return graph
