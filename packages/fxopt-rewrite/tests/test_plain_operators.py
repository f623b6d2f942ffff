"""What a graph from a stranger may call, compared with all that torch has."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._C import _jit_get_all_schemas
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule

from fxopt_core import set_arguments
from fxopt_core.errors import FxoptError
from fxopt_rewrite import (
    MalformedError,
    UntrustedNameError,
    check_targets,
    check_values,
    is_plain_identifier,
    is_plain_method,
    is_plain_path,
    plain_name,
)
from fxopt_rewrite.plain_names import is_plain_attribute, plain_function
from fxopt_rewrite.plain_operators import is_plain_operator, plain_operators

WORDS = {
    "UPLO", "algorithm", "api_name", "approximate", "assert_msg", "attr", "binary_attr", "driver", "equation",
    "indexing", "interpolation", "mode", "norm", "ord", "p", "pad_mode", "padding", "padding_side", "reduce",
    "rounding_mode", "side", "unary_algorithm", "unary_attr",
}  # fmt: skip
"""The arguments of listed operators that are text: words that choose among ways to compute."""


def registered() -> Iterator[OpOverload]:
    """Yield every operator that torch has registered."""
    for schema in _jit_get_all_schemas():
        space, _, name = schema.name.partition("::")
        packet = getattr(getattr(torch.ops, space), name, None)
        found = getattr(packet, schema.overload_name or "default", None)
        if isinstance(found, OpOverload):
            yield found


def test_no_listed_operator_takes_a_file_a_function_or_a_pickle() -> None:
    """Of all that torch has registered; an operator of a new torch whose text is something else is seen here."""
    plain = [each for each in registered() if is_plain_operator(each)]
    assert len(plain) > 1500
    texts = {(a.name, each) for each in plain for a in each._schema.arguments if "str" in str(a.type)}
    assert {name for name, _ in texts} <= WORDS, texts
    kinds = {str(a.type) for each in plain for a in (*each._schema.arguments, *each._schema.returns)}
    assert not [
        kind for kind in kinds if any(word in kind for word in ("Storage", "Stream", "Any", "__torch__", "Dict"))
    ]


def test_most_of_the_registry_is_outside() -> None:
    """Files, devices' state, sparse and quantized internals, other libraries, and whatever a new torch brings."""
    outside = {each._schema.name for each in registered() if not is_plain_operator(each)}
    assert {
        "aten::from_file", "aten::save", "aten::set_", "aten::record_stream", "aten::_print", "aten::warn",
        "aten::_pin_memory", "aten::_sparse_coo_tensor_unsafe", "aten::_nested_view_from_buffer", "aten::manual_seed",
        "aten::_cufft_set_plan_cache_max_size", "inductor::_reinterpret_tensor", "profiler::_record_function_enter_new",
    } <= outside  # fmt: skip
    spaces = {name.partition("::")[0] for name in plain_operators()}
    assert spaces == {"aten", "higher_order", "mkldnn", "prims", "quantized_decomposed", "torchvision"}


def test_an_operator_that_is_registered_later_is_outside() -> None:
    library: Any = torch.library
    library = library.Library("stranger", "FRAGMENT")
    library.define("write(Tensor x, str path) -> Tensor")
    assert not is_plain_operator(torch.ops.stranger.write.default)
    with pytest.raises(UntrustedNameError, match="is not an operator that an untrusted file may call"):
        plain_function("torch:ops.stranger.write.default")
    library._destroy()


def test_every_listed_operator_of_torch_is_there() -> None:
    """A name that is misspelt, or that torch has dropped, allows nothing, and is seen here."""
    dropped = {"aten::qr", "aten::cholesky"}  # by torch 2.14
    gone = [
        name
        for name in plain_operators()
        if not name.startswith(("torchvision", "quantized"))
        and name not in dropped
        and not hasattr(getattr(torch.ops, name.partition("::")[0]), name.partition("::")[2])
    ]
    assert not gone


@pytest.mark.parametrize(
    "name",
    [
        "torch:load", "torch:save", "torch.hub:load", "torch:from_file", "torch:set_num_threads", "torch:compile",
        "builtins:eval", "builtins:open", "builtins:map", "builtins:filter", "builtins:sorted", "builtins:setattr",
        "_operator:call", "_operator:methodcaller", "_operator:attrgetter", "math:factorial", "math:comb", "math:perm",
        "math:prod", "torch._tensor:Tensor.share_memory_", "torch:ops.load_library", "torch:ops.aten.from_file",
        "torch:ops.aten.save.default", "torch:ops.aten.add.t", "torch:ops.higher_order.call_torchbind",
        "torch.nn.functional:triplet_margin_with_distance_loss", "torch._tensor:Tensor.apply_",
    ],
)  # fmt: skip
def test_functions_that_are_refused(name: str) -> None:
    with pytest.raises(FxoptError, match="found"):
        plain_function(name)


def test_functions_that_graphs_call() -> None:
    functions = [
        operator.add, torch.relu, nn.functional.cross_entropy, torch.ops.aten.add.Tensor, getattr, torch.zeros,
        torch.nn.functional.scaled_dot_product_attention, torch.cat, Tensor.add, nn.functional.pad,
        Tensor.view, torch.unique, torch.ops.higher_order.cond, torch.einsum, torch.sym_max, math.sqrt,
    ]  # fmt: skip
    assert [plain_function(plain_name(function)) for function in functions] == functions


@pytest.mark.parametrize(
    "name", ["numpy", "tolist_", "register_hook", "apply_", "map_", "share_memory_", "set_", "storage"]
)
def test_methods_that_are_refused(name: str) -> None:
    assert not is_plain_method(name)


def test_attributes_are_data() -> None:
    assert all(map(is_plain_attribute, ["shape", "dtype", "device", "values", "last_hidden_state", "T", "min"]))
    assert not any(map(is_plain_attribute, ["numpy", "to_folder", "__class__", "_parameters", "\uff4eumpy", "a b", 3]))


def test_names_are_no_code_and_no_methods() -> None:
    assert all(map(is_plain_path, ["weight", "encoder.0.weight", "blocks.layer-1.q proj.bias", "model.graph.weight"]))
    refused = [
        'q", x, ".weight',
        "q\n",
        "a..b",
        "",
        "to_folder",
        "a.forward",
        "\uff54o_folder",
        "__class__",
        "a.__dict__",
    ]
    assert not any(map(is_plain_path, [*refused, "a\\b", "{a}", "a;b", "graph", "_parameters", None, 3]))
    assert [is_plain_identifier(name) for name in ("x", "x1", "if", "x=1", "\uff58", "")] == [True, True, *[False] * 4]


def graph_with(function: Any, *args: Any, kind: Any = None, **kwargs: Any) -> Graph:
    """Return the graph of a call."""
    graph = Graph()
    x = graph.placeholder("x")
    node = graph.create_node("call_function", function, (x,), {})
    set_arguments(node, (x, *args), kwargs)
    node.type = kind
    graph.output(node)
    return graph


class TestGraphs:
    """Graphs of data, before torch generates code from them."""

    @pytest.mark.parametrize(
        "graph",
        [
            graph_with(max, key=len),
            graph_with(max, key="x"),
            graph_with(torch.relu, getattr),
            graph_with(torch.relu, [{"a": (getattr,)}]),
            graph_with(torch.relu, object()),
            graph_with(torch.relu, kind=object()),
            graph_with(torch.amp.autocast_mode._enter_autocast),
        ],
    )
    def test_what_is_refused(self, graph: Graph) -> None:
        with pytest.raises(MalformedError):
            check_values(graph)

    @pytest.mark.parametrize(
        "given", [{"base": 3, "exp": 10**7}, {"exp": 10**7, "base": 3}, {"mod": None, "exp": 10**7, "base": 3}], ids=str
    )
    def test_powers_by_name_are_bounded_in_any_order(self, given: dict[str, Any]) -> None:
        graph = Graph()
        node = graph.call_function(pow)
        set_arguments(node, (), given)
        graph.output(node)
        with pytest.raises(MalformedError):
            check_values(graph)

    @pytest.mark.parametrize(
        ("args", "given", "refused"),
        [
            ((), {"step": 1e-12, "start": 0, "end": 10}, True),
            ((5,), {"step": 1e-12}, True),
            ((0, "x", 1e-12), {}, True),
            ((), {"end": 2**40}, True),
            ((0, "x"), {"step": 2}, False),
            ((), {"start": 3, "end": 9}, False),
            (("x",), {"dtype": torch.int64}, False),
        ],
        ids=str,
    )
    def test_ranges_are_bounded(self, args: tuple[Any, ...], given: dict[str, Any], refused: bool) -> None:
        graph = Graph()
        x = graph.placeholder("x")
        node = graph.call_function(torch.arange)
        set_arguments(node, tuple(x if each == "x" else each for each in args), given)
        graph.output(node)
        with pytest.raises(MalformedError) if refused else nullcontext():
            check_values(graph)

    def test_arguments_are_data(self) -> None:
        check_values(
            graph_with(torch.relu, 1, [torch.float32, slice(None, 3)], {"a": (None, ...)}, Tensor, kind=Tensor)
        )
        check_values(graph_with(torch.relu, torch.ops.aten.add.Tensor, kind="Tensor", dim=torch.Size([3])))

    @pytest.mark.parametrize("name", ["forward", "to_folder", "missing", "training"])
    def test_a_node_reads_no_method(self, name: str) -> None:
        root = GraphModule(nn.Module(), Graph())
        root._modules["forward"] = root._modules["to_folder"] = nn.Linear(1, 1)
        graph = Graph()
        graph.output(graph.create_node("call_module", name))
        with pytest.raises(MalformedError, match="which no module has"):
            check_targets(graph, root)
