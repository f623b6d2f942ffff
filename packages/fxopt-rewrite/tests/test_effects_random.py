"""The analysis against reality: programs drawn at random are run, and whatever happens has to have been foretold."""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from test_own_memory import SlicingRun
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Interpreter, Node

from fxopt_core import iter_nodes
from fxopt_core.errors import PreconditionError
from fxopt_rewrite import Effects, infer_shapes, is_python_number

aten = torch.ops.aten
SHAPE = (4, 6)


def write_first(x: Tensor, y: Tensor) -> Tensor:
    """What the analysis knows nothing of."""
    x.mul_(3)
    return y


class Keeper(nn.Module):
    """A module of the user's own that keeps and later writes what it was given."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("kept", torch.zeros(SHAPE))

    def forward(self, x: Tensor) -> Tensor:
        kept: Tensor = self.get_buffer("kept")
        kept.add_(1)
        return kept if x.dim() > 1 else x.add_(1)


class Root(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(SHAPE), requires_grad=False)
        self.square = nn.Parameter(torch.eye(SHAPE[1]), requires_grad=False)
        self.register_buffer("part", self.weight[1:])
        self.relu, self.identity, self.flatten = nn.ReLU(inplace=True), nn.Identity(), nn.Flatten(0)
        self.chain = nn.Sequential(nn.Dropout(), nn.Hardtanh(inplace=True))
        self.keeper = Keeper()
        self.eval()


Step = Callable[[Graph, Node, Node], Node]
VIEWS: list[tuple[Any, ...]] = [
    ("view", -1), ("view", 6, 4), ("view", -1, 2), ("reshape", -1), ("reshape", 3, -1), ("flatten",),
    ("transpose", 0, -1), ("t",), ("unsqueeze", 0), ("squeeze",), ("narrow", 0, 1, 1), ("detach",), ("contiguous",),
    ("float",), ("select", 0, 0), ("unflatten", -1, (2, -1)), ("expand", 2, -1, -1), ("diagonal",),
    ("unfold", 0, 2, 1), ("ravel",),
]  # fmt: skip
METHODS: list[tuple[Any, ...]] = [
    ("add_", 1), ("mul_", 2), ("relu_",), ("zero_",), ("clamp_", -1, 1), ("neg_",), ("fill_", 5.0), ("t_",),
    ("unsqueeze_", 0), ("clone",), ("exp",), ("sum", 0), ("add", 1), ("cumsum", 0), ("to", torch.float64),
    ("to", torch.float32), ("repeat", 2, 1), ("sin",), ("stride", 0), ("is_contiguous",),
]  # fmt: skip
FUNCTIONS: list[tuple[Any, ...]] = [
    (torch.relu,), (operator.neg,), (operator.iadd, 1), (operator.imul, 2), (operator.setitem, 0, 2.0),
    (operator.add, 1), (operator.getitem, slice(1, None)), (operator.getitem, 0), (operator.getitem, (Ellipsis, 0)),
    (operator.pos,), (F.dropout, 0.5, False), (F.relu, True), (F.leaky_relu, 0.1, True),
    (F.hardtanh, -1.0, 1.0, True), (F.softmax, -1), (F.gelu,), (torch.sum, 0), (torch.as_strided, (2, 2), (2, 1)),
    (torch.permute, (1, 0)), (torch.swapaxes, 0, -1), (aten.view.default, [-1]), (aten._unsafe_view.default, [-1, 2]),
    (aten.add_.Tensor, 1), (aten.alias.default,), (aten.slice.Tensor, 0, 1, 3), (aten.relu_.default,),
    (aten._to_copy.default,), (aten.t.default,), (getattr, "T"), (getattr, "data"), (getattr, "shape"),
    (aten.dropout.default, 0.5, False), (torch.select_copy, 0, 0),
]  # fmt: skip
BINARY: list[Any] = [
    operator.add, operator.iadd, operator.isub, torch.mul, torch.matmul, F.linear, write_first, aten.copy_.default,
    torch.maximum, torch.where, torch.Tensor.add_, torch.Tensor.expand_as, torch.Tensor.view_as, torch.Tensor.type_as,
    aten.add.Tensor, torch.broadcast_tensors, torch.cat, torch.einsum,
]  # fmt: skip
MODULES = ("relu", "identity", "flatten", "chain", "keeper")


def method(arguments: tuple[Any, ...]) -> Step:
    return lambda graph, x, y: graph.call_method(arguments[0], (x, *arguments[1:]))


def function(arguments: tuple[Any, ...]) -> Step:
    return lambda graph, x, y: graph.call_function(arguments[0], (x, *arguments[1:]))


def binary(target: Any) -> Step:
    if target is torch.cat:
        return lambda graph, x, y: graph.call_function(target, ([x, y],))
    if target is torch.einsum:
        return lambda graph, x, y: graph.call_function(target, ("ij->ji", x))
    if target is torch.where:
        return lambda graph, x, y: graph.call_function(target, (graph.call_method("gt", (x, 0)), x, y))
    return lambda graph, x, y: graph.call_function(target, (x, y))


STEPS: list[Step] = [
    *(method(arguments) for arguments in VIEWS + METHODS),
    *(function(arguments) for arguments in FUNCTIONS),
    *(binary(target) for target in BINARY),
    *((lambda graph, x, y, name=name: graph.call_module(name, (x,))) for name in MODULES),
    lambda graph, x, y: graph.call_function(torch.add, (x, 1), {"out": y}),
    lambda graph, x, y: graph.call_function(operator.getitem, (graph.call_method("chunk", (x, 2)), 0)),
    lambda graph, x, y: graph.call_function(operator.getitem, (graph.call_function(tuple, ([x, y],)), 1)),
    lambda graph, x, y: graph.create_node("get_attr", "weight"),
    lambda graph, x, y: graph.create_node("get_attr", "part"),
]

VIEWING = list(range(len(VIEWS)))
CHOICES = st.lists(
    st.tuples(
        st.one_of(st.sampled_from(VIEWING), st.integers(0, len(STEPS) - 1)),
        st.one_of(st.integers(0, 2), st.integers(0, 30)),
        st.one_of(st.integers(0, 2), st.integers(0, 30)),
    ),
    min_size=2,
    max_size=10,
)
"""Steps, and what they work on: how many usable values before the last."""
CHAINS = st.lists(
    st.tuples(
        st.one_of(st.sampled_from(VIEWING), st.integers(0, len(STEPS) - 1)), st.integers(0, 1), st.integers(0, 3)
    ),
    min_size=1,
    max_size=4,
)
"""Few steps, mostly each on what the last one gave."""
RETURNED = st.sets(st.integers(0, 30), max_size=3)


def inputs(seed: int = 0) -> tuple[Tensor, Tensor]:
    x = torch.arange(float(2 * SHAPE[0] * SHAPE[1])).sin().mul_(3 + seed)
    return x[: SHAPE[0] * SHAPE[1]].view(SHAPE).clone(), x[SHAPE[0] * SHAPE[1] :].view(SHAPE).clone()


def build(choices: list[tuple[int, int, int]], returned: set[int], *, expose: bool) -> GraphModule:
    """Make a program of the drawn steps, leaving out those that cannot run there."""
    graph, root = Graph(), Root()
    usable = [graph.placeholder("x"), graph.placeholder("y")]
    usable.append(graph.call_function(F.linear, (usable[0], graph.create_node("get_attr", "square"))))
    for step, first, second in choices:
        before = list(iter_nodes(graph))
        node = STEPS[step](graph, usable[-1 - first % len(usable)], usable[-1 - second % len(usable)])
        node_value = value_of(root, graph, node)
        if isinstance(node_value, Exception):
            for added in reversed([n for n in iter_nodes(graph) if n not in before]):
                graph.erase_node(added)
        elif isinstance(node_value, Tensor) and node_value.numel() > 0:
            usable.append(node)
    chosen = [usable[-1 - index % len(usable)] for index in sorted(returned)]
    if not expose:
        chosen = [graph.call_method("sum", (node,)) for node in chosen]
    graph.output(tuple(chosen))
    return GraphModule(root, graph)


def value_of(root: Root, graph: Graph, node: Node) -> object:
    """Return what a node gives, or the exception that it raises."""
    run = Interpreter(Root(), graph=graph, garbage_collect_values=False)
    run.extra_traceback = False
    try:
        run.run(*inputs())
    except (RuntimeError, TypeError, IndexError, ValueError, AttributeError, UserWarning) as error:
        return error
    return run.env.get(node)


def tensors_of(value: object) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for item in value for tensor in tensors_of(item)] if isinstance(value, (tuple, list)) else []


def same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.equal(one.nan_to_num(), other.nan_to_num())


class Watching(Interpreter):
    """Runs a program; at every node, checks what changed and what shares memory against the analysis."""

    def __init__(self, graph_module: GraphModule, effects: Effects) -> None:
        super().__init__(graph_module, garbage_collect_values=False)
        self.effects = effects
        self.order = list(iter_nodes(graph_module.graph))
        self.extra_traceback = False
        self.kept = {name: tensor.clone() for name, tensor in graph_module.state_dict().items()}

    def run_node(self, n: Node) -> Any:
        before = {node: [t.clone() for t in tensors_of(value)] for node, value in self.env.items()}
        value = super().run_node(n)
        place = self.order.index(n)
        for node, copies in before.items():
            now = tensors_of(self.env[node])
            if not all(same(a, b) for a, b in zip(copies, now, strict=True)):
                start, end = self.order[max(place - 1, 0)], self.order[min(place + 1, len(self.order) - 1)]
                assert n.op != "output"
                assert self.effects.written_between(node, start, end), f"{n} writes {node}"
        for argument in n.all_input_nodes if n.op != "output" else ():
            if shares(value, self.env[argument]):
                aliased = self.effects.aliases(n)
                assert any(shares(self.env[argument], self.env[node]) for node in aliased), f"{n} aliases {argument}"
        return value

    def check_state(self) -> None:
        module = self.module
        assert isinstance(module, GraphModule)
        for name, tensor in module.state_dict(keep_vars=True).items():
            if not same(tensor, self.kept[name]):
                assert self.effects.tensor_written(tensor), name


def storages(value: object) -> set[int]:
    return {tensor.untyped_storage().data_ptr() for tensor in tensors_of(value)}


def shares(one: object, other: object) -> bool:
    return bool(storages(one) & storages(other))


@settings(deadline=None)
@given(CHOICES, RETURNED)
def test_whatever_is_written_or_shared_was_foretold(choices: list[tuple[int, int, int]], returned: set[int]) -> None:
    graph_module = build(choices, returned, expose=True)
    x, y = inputs()
    both = torch.cat([x, y])
    for arguments in ((x.clone(), y.clone()), (x, x), (both[:4], both[2:6])):
        run = Watching(graph_module, Effects(graph_module))
        try:
            run.run(*arguments)
        except (RuntimeError, IndexError, UserWarning):
            assert shares(*arguments), "only a program on inputs that overlap may break off"
        run.check_state()


class Slicing(SlicingRun):
    """Runs a program with the value of one node replaced by an equal slice of a larger tensor; None for a plain run."""

    def __init__(self, graph: Graph, sliced: Node | None) -> None:
        super().__init__(Root(), sliced, graph)

    def all_that_is_left(self) -> list[Tensor]:
        """Run; return the results, the inputs and the module's state after it."""
        given_inputs = inputs()
        return [*tensors_of(self.run(*given_inputs)), *given_inputs, *self.module.state_dict().values()]


@settings(max_examples=settings().max_examples // 2, deadline=None)
@given(CHAINS, RETURNED, st.booleans())
def test_where_no_own_memory_is_needed_a_slice_goes_unnoticed(
    choices: list[tuple[int, int, int]], returned: set[int], shapes_known: bool
) -> None:
    graph_module = build(choices, returned, expose=False)
    plain = Slicing(graph_module.graph, None)
    expected = plain.all_that_is_left()
    if shapes_known:
        with contextlib.suppress(PreconditionError):
            infer_shapes(graph_module, *inputs())
    effects = Effects(graph_module)
    for node in iter_nodes(graph_module.graph):
        value = plain.env.get(node)
        is_candidate = (
            isinstance(value, Tensor) and value.dim() > 0 and value.is_contiguous() and not effects.aliases(node)
        )
        if node.op in {"call_function", "call_method"} and is_candidate and not effects.needs_own_memory(node):
            found = Slicing(graph_module.graph, node).all_that_is_left()
            torch.testing.assert_close(found, expected, equal_nan=True, rtol=1e-4, atol=1e-4)


@settings(max_examples=settings().max_examples // 3, deadline=None)
@given(CHOICES, RETURNED)
def test_inferred_shapes_are_those_of_a_run(choices: list[tuple[int, int, int]], returned: set[int]) -> None:
    graph_module = build(choices, returned, expose=True)
    numbers = {node: is_python_number(node) for node in iter_nodes(graph_module.graph)}
    infer_shapes(graph_module, *inputs())
    values: dict[Node, object] = {}

    class Noting(Slicing):
        def run_node(self, n: Node) -> Any:
            value = super().run_node(n)
            values[n] = [(t.shape, t.dtype, t.stride()) for t in tensors_of(value)] or value
            if numbers[n] is not None:
                assert isinstance(value, (int, float)) is numbers[n]
            return value

    Noting(graph_module.graph, None).all_that_is_left()
    for node, value in values.items():
        inferred = node.meta["val"]
        assert ([(t.shape, t.dtype, t.stride()) for t in tensors_of(inferred)] or inferred) == value, node
