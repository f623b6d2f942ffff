"""What single calls of functions, methods and operators write and share."""

from __future__ import annotations

import builtins
import operator
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils._pytree as pytree
from site_passes import nodes_of
from torch import Tensor
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node, symbolic_trace

from fxopt_core import iter_nodes
from fxopt_rewrite import Effects, aten_overloads
from fxopt_rewrite._torch import has_kernel_for
from fxopt_rewrite.effects.rules import rule_of_operator
from fxopt_rewrite.ops.names import qualified_name

aten = torch.ops.aten


def last_call(graph_module: GraphModule) -> Node:
    return list(iter_nodes(graph_module.graph))[-2]


def describe(function: Any) -> tuple[list[str], list[str], bool]:
    """Trace a function of one expression; return what its last call writes and aliases, and whether it is opaque."""
    graph_module = symbolic_trace(function)
    effects, call = Effects(graph_module), last_call(graph_module)
    names = [sorted(node.name for node in found) for found in (effects.writes(call), effects.aliases(call))]
    return names[0], names[1], effects.effect(call).opaque


@torch.fx.wrap
def unknown(x: Tensor, y: Tensor) -> Tensor:
    return x


FRESH: list[Any] = [
    lambda x, y: x + y.relu(),
    lambda x, y: torch.add(x, y),
    lambda x, y: x.add(y, alpha=2),
    lambda x, y: torch.cat([x, y]),
    lambda x, y: F.linear(x, y),
    lambda x, y: F.softmax(x, dim=-1),
    lambda x, y: F.relu(x),
    lambda x, y: F.relu(x, inplace=False),
    lambda x, y: F.relu(x, False),
    lambda x, y: F.pad(x, (1, 1)),
    lambda x, y: F.interpolate(x, scale_factor=2),
    lambda x, y: F.scaled_dot_product_attention(x, x, y),
    lambda x, y: F.normalize(x),
    lambda x, y: F.max_pool2d(x, 2),
    lambda x, y: F.layer_norm(x, (4,)),
    lambda x, y: F.batch_norm(x, y, y, training=False),
    lambda x, y: F.embedding(x, y),
    lambda x, y: F.gelu(x),
    lambda x, y: torch.conv2d(x, y),
    lambda x, y: torch.matmul(x, y),
    lambda x, y: torch.einsum("ij,jk->ik", x, y),
    lambda x, y: torch.where(x, y, 0.0),
    lambda x, y: torch.linalg.norm(x),
    lambda x, y: torch.softmax(x, 0),
    lambda x, y: x.clone(),
    lambda x, y: x.sum(dim=0, keepdim=True),
    lambda x, y: x.masked_fill(y, 0.0),
    lambda x, y: x.size(0),
    lambda x, y: x.shape,
    lambda x, y: x.repeat(2, 1),
    lambda x, y: torch.relu(x).__rsub__(1),
    lambda x, y: -x,
    lambda x, y: abs(x),
    lambda x, y: 2.0 * x,
    lambda x, y: x == y,
    lambda x, y: x.item(),
    lambda x, y: x.tolist(),
    lambda x, y: aten.batch_norm.default(x, None, None, y, y, False, 0.1, 1e-5, False),
    lambda x, y: aten.sym_size.int(x, 0),
    lambda x, y: aten._to_copy.default(x),
]

ALIASES: list[tuple[Any, list[str]]] = [
    (lambda x, y: x.view(-1), ["x"]),
    (lambda x, y: x.reshape(y.size(0), -1), ["x"]),
    (lambda x, y: torch.transpose(x, 0, 1), ["x"]),
    (lambda x, y: torch.permute(x, (1, 0)), ["x"]),
    (lambda x, y: x.T, ["x"]),
    (lambda x, y: x.data, ["x"]),
    (lambda x, y: x[0], ["x"]),
    (lambda x, y: x[..., 1:], ["x"]),
    (lambda x, y: x.expand_as(y), ["x"]),
    (lambda x, y: x.chunk(2), ["x"]),
    (lambda x, y: torch.split(x, 2), ["x"]),
    (lambda x, y: x.contiguous(), ["x"]),
    (lambda x, y: x.to(torch.float16), ["x"]),
    (lambda x, y: x.float(), ["x"]),
    (lambda x, y: x.detach(), ["x"]),
    (lambda x, y: F.dropout(x, training=False), ["x"]),
    (lambda x, y: F.dropout2d(x, 0.5, False), ["x"]),
    (lambda x, y: torch.dropout(x, 0.5, False), ["x"]),
    (lambda x, y: torch.einsum("ij->ji", x), ["x"]),
    (lambda x, y: x.type_as(y), ["x"]),
    (lambda x, y: +x, ["x"]),
    (lambda x, y: torch.flatten(x, 1), ["x"]),
    (lambda x, y: aten.view.default(x, [2, -1]), ["x"]),
    (lambda x, y: aten._unsafe_view.default(x, [2, -1]), ["x"]),
    (lambda x, y: aten.dropout.default(x, 0.1, False), ["x"]),
    (lambda x, y: aten.transpose(x, 0, 1), ["x"]),
    (lambda x, y: x.logits, ["x"]),
    (lambda x, y: x + y, ["x", "y"]),  # two inputs of unknown kind may be lists
    (lambda x, y: x * 2, ["x"]),
]

WRITES: list[tuple[Any, list[str], list[str]]] = [
    (lambda x, y: x.add_(y), ["x"], ["x"]),
    (lambda x, y: torch.relu_(x), ["x"], ["x"]),
    (lambda x, y: F.relu(x, inplace=True), ["x"], ["x"]),
    (lambda x, y: F.relu(x, True), ["x"], ["x"]),
    (lambda x, y: F.leaky_relu(x, 0.1, True), ["x"], ["x"]),
    (lambda x, y: F.dropout(x, 0.5, True, True), ["x"], ["x"]),
    (lambda x, y: F.hardtanh_(x), ["x"], ["x"]),
    (lambda x, y: torch.add(x, 1, out=y), ["y"], ["y"]),
    (lambda x, y: F.normalize(x, out=y), ["y"], ["y"]),
    (lambda x, y: torch.max(x, 0, out=(x, y)), ["x", "y"], ["x", "y"]),
    (lambda x, y: x.copy_(y), ["x"], ["x"]),
    (lambda x, y: x.index_put_((y,), y), ["x"], ["x"]),
    (lambda x, y: x.masked_fill_(y, 0), ["x"], ["x"]),
    (lambda x, y: x.set_(y), ["x"], ["x", "y"]),
    (lambda x, y: x.__iadd__(1.0), ["x"], ["x"]),
    (lambda x, y: F.batch_norm(x, y, y, training=True), ["y"], []),
    (lambda x, y: F.instance_norm(x, y, y), ["y"], []),
    (lambda x, y: F.embedding(x, y, max_norm=1.0), ["x", "y"], []),
    (lambda x, y: torch.batch_norm(x, None, None, y, y, True, 0.1, 1e-5, False), ["y"], []),
    (lambda x, y: aten.batch_norm.default(x, None, None, y, y, True, 0.1, 1e-5, False), ["y"], []),
    (lambda x, y: aten.native_batch_norm.default(x, None, None, y, y, True, 0.1, 1e-5), ["y"], []),
    (lambda x, y: aten.add_.Tensor(x, y), ["x"], ["x"]),
    (lambda x, y: aten.add.out(x, 1, out=y), ["y"], ["y"]),
    (lambda x, y: torch._foreach_add_([x, y], 1.0), ["x", "y"], []),
]

OPAQUE: list[Any] = [
    lambda x, y: unknown(x, y),
    lambda x, y: x.frobnicate(y),
    lambda x, y: x.frobnicate_(y),
    lambda x, y: x.backward(y),
    lambda x, y: x.resize(y),
]


@pytest.mark.parametrize("function", FRESH)
def test_fresh_results(function: Any) -> None:
    assert describe(function) == ([], [], False)


@pytest.mark.parametrize(("function", "aliased"), ALIASES)
def test_results_that_share_memory(function: Any, aliased: list[str]) -> None:
    assert describe(function) == ([], aliased, False)


@pytest.mark.parametrize(("function", "written", "aliased"), WRITES)
def test_writes(function: Any, written: list[str], aliased: list[str]) -> None:
    assert describe(function) == (written, aliased, False)


@pytest.mark.parametrize("function", OPAQUE)
def test_opaque_calls_write_and_share_everything(function: Any) -> None:
    assert describe(function) == (["x", "y"], ["x", "y"], True)


def call(target: Callable[..., Any], *args: Any, tensors: bool = True, **kwargs: Any) -> tuple[list[str], list[str]]:
    """Return what a call of a function writes and aliases; strings among the arguments stand for inputs."""
    graph = Graph()
    inputs = {name: graph.placeholder(name) for name in "xyz"}
    if tensors:
        for node in inputs.values():
            node.meta["val"] = torch.zeros(1)
    named = [inputs.get(arg, arg) if isinstance(arg, str) else arg for arg in args]
    node = graph.call_function(target, tuple(named), {key: inputs[value] for key, value in kwargs.items()})
    graph.output(node)
    effects = Effects(GraphModule({}, graph))
    return sorted(n.name for n in effects.writes(node)), sorted(n.name for n in effects.aliases(node))


def test_operators_that_write() -> None:
    assert call(operator.iadd, "x", "y") == (["x"], ["x"])
    assert call(operator.imul, "x", 2) == (["x"], ["x"])
    assert call(operator.setitem, "x", 0, "y") == (["x"], [])
    assert call(operator.delitem, "x", 0) == (["x"], [])


def test_operators_on_what_may_be_a_container() -> None:
    assert call(operator.iadd, "x", "y", tensors=False) == (["x"], ["x", "y"])
    assert call(operator.setitem, "x", 0, "y", tensors=False) == (["x"], ["x", "y"])
    assert call(operator.add, "x", "y", tensors=False) == ([], ["x", "y"])
    assert call(operator.add, "x", 1, tensors=False) == ([], [])
    assert call(operator.or_, "x", "y", tensors=False) == ([], ["x", "y"])
    assert call(operator.sub, "x", "y", tensors=False) == ([], [])
    assert call(operator.add, "x", "y") == ([], [])


def test_builtins() -> None:
    assert call(builtins.tuple, "x") == ([], ["x"])
    assert call(builtins.max, "x", "y") == ([], ["x", "y"])
    assert call(builtins.len, "x") == ([], [])
    assert call(builtins.setattr, "x", "data", "y") == (["x", "y"], ["x", "y"])
    assert call(builtins.getattr, "x", "shape") == ([], [])
    assert call(builtins.getattr, "x", "grad") == ([], ["x"])


def test_functions_called_in_other_ways() -> None:
    assert call(torch.Tensor.add_, "x", "y") == (["x"], ["x"])
    assert call(torch.Tensor.view, "x", -1) == ([], ["x"])
    assert call(aten.add, "x", "y", out="z") == (["z"], ["z"])
    assert call(aten.add_, "x", "y") == (["x"], ["x"])
    assert call(torch.broadcast_tensors, "x", "y") == ([], ["x", "y"])
    assert call(torch.histogramdd, "x", "y") == ([], ["x", "y"])  # which returns the edges that it is given
    assert call(torch.as_tensor, "x") == ([], ["x"])
    assert call(torch.tensor, "x") == ([], [])
    assert call(torch.ops.prims.view_of.default, "x") == ([], ["x"])
    assert call(torch.ops.higher_order.cond, "x", "y") == (["x", "y"], ["x", "y"])
    assert call(F.relu, input="x", inplace="y") == (["x"], ["x"])


def test_operators_of_other_libraries() -> None:
    torch.library.define("fxopt_test_effects::plain", "(Tensor x) -> Tensor")
    torch.library.define("fxopt_test_effects::write", "(Tensor(a!) x, Tensor y) -> ()")
    operators = torch.ops.fxopt_test_effects
    assert call(operators.plain.default, "x") == ([], ["x"])
    assert call(operators.write.default, "x", "y") == (["x"], [])
    assert call(operators.write, "x", "y") == (["x"], [])


def composites() -> Iterator[tuple[str, OpOverload]]:
    """Yield the composite operators of torch whose schemas and tags promise new memory."""
    for name in sorted({schema.name.removeprefix("aten::") for schema in torch._C._jit_get_all_schemas()}):
        for overload in aten_overloads(name):
            rule = rule_of_operator(overload)
            composite = has_kernel_for(qualified_name(overload), "CompositeImplicitAutograd")
            shares = rule.aliases or rule.aliases_all or rule.aliases_one
            if composite and not (name.startswith("_") or rule.writes or shares):
                yield name, overload


@pytest.mark.filterwarnings("ignore")
def test_what_schemas_and_tags_promise_is_so() -> None:
    """Run every composite operator on a few small inputs; one that a new torch brings is seen here."""
    ran, sharing = set(), set()
    for (name, overload), shape, number in product(composites(), [(3, 3), (1,), (), (1, 1, 1, 1)], [0, 1, 2]):
        kinds: dict[str, Any] = {"int": number, "List[int]": [number], "float": 1.0, "number": 1.0, "bool": False}
        kinds |= {"Tensor": torch.rand(shape), "List[Tensor]": [torch.rand(shape)], "str": "mean"}
        needed = [each for each in overload._schema.arguments if not each.has_default_value()]
        try:
            arguments = [kinds[str(each.real_type)] for each in needed]
            results = pytree.tree_leaves(overload(*arguments))
        except (KeyError, RuntimeError, TypeError, ValueError, IndexError, NotImplementedError):
            continue  # it takes other inputs
        ran.add(name)
        given = {each.untyped_storage()._cdata for each in pytree.tree_leaves(arguments) if isinstance(each, Tensor)}
        found = (each for each in results if isinstance(each, Tensor) and each.layout == torch.strided)
        if not given.isdisjoint(each.untyped_storage()._cdata for each in found):
            sharing.add(name)
    assert not sharing
    assert len(ran) > 150


def test_numbers_are_neither_written_nor_shared() -> None:
    def forward(x: Tensor) -> Any:
        count = x.size(0)
        count += 1
        return unknown(x, count)  # type: ignore[arg-type]  # on purpose

    graph_module = symbolic_trace(forward)
    effects, nodes = Effects(graph_module), nodes_of(graph_module)
    assert effects.writes(last_call(graph_module)) == (nodes["x"],)
    assert not effects.written_between(nodes["size"], nodes["x"], nodes["output"])
