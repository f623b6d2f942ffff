"""One operation, one reading: modules, functions, methods, Python's operators and ``aten`` give equal `Operation`s."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node

from fxopt_rewrite import GraphIndex, Operation, TensorRef, input_of, read_operation
from fxopt_rewrite.ops.vocabulary import _OPERATORS, MODULES

aten: Any = torch.ops.aten


class Read(str):
    """Stands for a parameter or buffer of the layer."""


X, Y = object(), object()
W, B, MEAN, VAR = map(Read, ("weight", "bias", "running_mean", "running_var"))
Call = tuple[Any, ...]  # a target, its arguments, and a dict of keywords where there are some
Case = tuple[nn.Module | None, Sequence[Call]]


def unary(module: nn.Module, name: str, *functions: Callable[..., object]) -> Case:
    method = [(name, X)] if hasattr(Tensor, name) else []
    return module, [*((each, X) for each in functions), *method, (getattr(aten, name).default, X)]


def pool(kind: str, dims: int, *settings: Any) -> Case:
    name, module = f"{kind}_pool{dims}d", "".join(part.capitalize() for part in kind.split("_")) + f"Pool{dims}d"
    lists = [[each] * dims for each in settings]
    return getattr(nn, module)(*settings), [(getattr(F, name), X, *settings), (getattr(aten, name).default, X, *lists)]


def convolution(dims: int, **options: Any) -> Case:
    name, layer = f"conv{dims}d", getattr(nn, f"Conv{dims}d")(4, 6, 3, **options)
    given = [layer.stride, layer.padding, layer.dilation, layer.groups]
    overload = getattr(aten, name).padding if isinstance(layer.padding, str) else getattr(aten, name).default
    return layer, [(target, X, W, B, *given) for target in (getattr(F, name), getattr(torch, name), overload)]


def transposed(dims: int) -> Case:
    name, layer = f"conv_transpose{dims}d", getattr(nn, f"ConvTranspose{dims}d")(4, 6, 3, stride=2, output_padding=1)
    given = (layer.stride, layer.padding, layer.output_padding, layer.groups, layer.dilation)
    overload = getattr(getattr(aten, name), "default" if dims == 1 else "input")
    return layer, [(target, X, W, B, *given) for target in (getattr(F, name), overload)]


def binary(name: str, function: Callable[..., object], *others: Callable[..., object]) -> Case:
    overloads = [getattr(getattr(aten, name), each, None) for each in ("Tensor", "Tensor_Tensor", "default")]
    found = [(target, X, Y) for target in (*others, next(filter(None, overloads)), function, f"{name}")]
    return None, [*found, (function, {"input": X, _second(name): Y}), (name, X, {_second(name): Y})]


def _second(name: str) -> str:
    return {"pow": "exponent"}.get(name, "other")


def dropout(module: nn.Module, function: Callable[..., object], overload: object | None) -> Case:
    calls: list[Call] = [(function, X, 0.3, False), (function, X, {"p": 0.3, "training": False})]
    return module.eval(), [*calls, *([] if overload is None else [(overload, X, 0.3, False)])]


NORM = nn.BatchNorm2d(3).eval()
CASES: dict[str, Case] = {
    "linear": (
        nn.Linear(3, 4),
        [(F.linear, X, W, B), (F.linear, X, {"weight": W, "bias": B}), (aten.linear.default, X, W, B)],
    ),
    **{f"conv{dims}d": convolution(dims, padding=1, stride=2) for dims in (1, 2, 3)},
    "conv2d, same": convolution(2, padding="same", groups=2),
    **{f"conv_transpose{dims}d": transposed(dims) for dims in (1, 2, 3)},
    "batch_norm": (
        NORM,
        [
            (F.batch_norm, X, MEAN, VAR, W, B),
            (torch.batch_norm, X, W, B, MEAN, VAR, False, 0.1, 1e-5, True),
            (aten.batch_norm.default, X, W, B, MEAN, VAR, False, 0.1, 1e-5, False),
        ],
    ),
    "layer_norm": (nn.LayerNorm(4), [(F.layer_norm, X, (4,), W, B), (aten.layer_norm.default, X, [4], W, B)]),
    "rms_norm": (
        nn.RMSNorm(4),
        [(F.rms_norm, X, [4], W), (torch.rms_norm, X, (4,), W), (aten.rms_norm.default, X, [4], W)],
    ),
    "group_norm": (nn.GroupNorm(2, 4), [(F.group_norm, X, 2, W, B), (aten.group_norm.default, X, 2, W, B)]),
    "embedding": (nn.Embedding(5, 3), [(F.embedding, X, W), (torch.embedding, W, X), (aten.embedding.default, W, X)]),
    "embedding, padded": (nn.Embedding(5, 3, 0), [(F.embedding, X, W, 0), (aten.embedding.default, W, X, 0)]),
    "relu": unary(nn.ReLU(), "relu", F.relu, torch.relu),
    "relu6": unary(nn.ReLU6(), "relu6", F.relu6),
    "sigmoid": unary(nn.Sigmoid(), "sigmoid", F.sigmoid, torch.sigmoid, torch.special.expit),
    "tanh": unary(nn.Tanh(), "tanh", F.tanh, torch.tanh),
    "silu": unary(nn.SiLU(), "silu", F.silu),
    "selu": unary(nn.SELU(), "selu", F.selu, torch.selu),
    "mish": unary(nn.Mish(), "mish", F.mish),
    "hardswish": unary(nn.Hardswish(), "hardswish", F.hardswish),
    "hardsigmoid": unary(nn.Hardsigmoid(), "hardsigmoid", F.hardsigmoid),
    "log_sigmoid": unary(nn.LogSigmoid(), "log_sigmoid", F.logsigmoid),
    "gelu": (nn.GELU("tanh"), [(F.gelu, X, {"approximate": "tanh"}), (aten.gelu.default, X, {"approximate": "tanh"})]),
    "elu": (nn.ELU(0.5), [(F.elu, X, 0.5), (aten.elu.default, X, 0.5)]),
    "leaky_relu": (nn.LeakyReLU(0.1), [(F.leaky_relu, X, 0.1), (aten.leaky_relu.default, X, 0.1)]),
    "hardtanh": (nn.Hardtanh(0, 6), [(F.hardtanh, X, 0, 6), (aten.hardtanh.default, X, 0, 6)]),
    "softplus": (nn.Softplus(2.0), [(F.softplus, X, 2.0), (aten.softplus.default, X, 2.0)]),
    "softmax": (
        nn.Softmax(-1),
        [(F.softmax, X, -1), (torch.softmax, X, -1), ("softmax", X, -1), (aten.softmax.int, X, -1)],
    ),
    "log_softmax": (nn.LogSoftmax(1), [(F.log_softmax, X, 1), ("log_softmax", X, 1), (aten.log_softmax.int, X, 1)]),
    "dropout": dropout(nn.Dropout(0.3), F.dropout, aten.dropout.default),
    "dropout1d": dropout(nn.Dropout1d(0.3), F.dropout1d, None),
    "dropout2d": dropout(nn.Dropout2d(0.3), F.dropout2d, None),
    "dropout3d": dropout(nn.Dropout3d(0.3), F.dropout3d, None),
    "alpha_dropout": dropout(nn.AlphaDropout(0.3), F.alpha_dropout, aten.alpha_dropout.default),
    "feature_alpha_dropout": dropout(
        nn.FeatureAlphaDropout(0.3), F.feature_alpha_dropout, aten.feature_alpha_dropout.default
    ),
    **{f"max_pool{dims}d": pool("max", dims, 2, 2, 1) for dims in (1, 2, 3)},
    **{f"avg_pool{dims}d": pool("avg", dims, 2, 2) for dims in (1, 2, 3)},
    **{f"adaptive_avg_pool{dims}d": pool("adaptive_avg", dims, 1) for dims in (1, 2, 3)},
    "flatten": (nn.Flatten(), [(torch.flatten, X, 1), ("flatten", X, 1), (aten.flatten.using_ints, X, 1)]),
    "pad": (
        nn.ConstantPad2d((1, 2, 0, 0), 0),
        [(F.pad, X, (1, 2, 0, 0), "constant", 0), (aten.constant_pad_nd.default, X, [1, 2, 0, 0], 0)],
    ),
    "identity": (nn.Identity(), []),
    "add": binary("add", torch.add, operator.add),
    "add, scaled": (
        None,
        [(torch.add, X, Y, {"alpha": 2}), ("add", X, Y, {"alpha": 2}), (aten.add.Tensor, X, Y, {"alpha": 2})],
    ),
    "add, a number": (
        None,
        [(operator.add, X, 2), (torch.add, X, 2), (aten.add.Tensor, X, 2), (aten.add.Scalar, X, 2)],
    ),
    "sub": binary("sub", torch.sub, operator.sub, torch.subtract),
    "mul": binary("mul", torch.mul, operator.mul, torch.multiply),
    "div": binary("div", torch.div, operator.truediv, torch.true_divide, aten.div.Tensor),
    "div, rounding": (
        None,
        [(target, X, Y, {"rounding_mode": "floor"}) for target in (torch.div, "div", aten.div.Tensor_mode)],
    ),
    "pow": binary("pow", torch.pow, operator.pow, pow),
    "matmul": binary("matmul", torch.matmul, operator.matmul, torch.linalg.matmul),
    "eq": binary("eq", torch.eq, operator.eq),
    "ne": binary("ne", torch.ne, operator.ne),
    "ge": binary("ge", torch.ge, operator.ge, torch.greater_equal),
    "gt": binary("gt", torch.gt, operator.gt),
    "le": binary("le", torch.le, operator.le),
    "lt": binary("lt", torch.lt, operator.lt, torch.less),
    "remainder": binary("remainder", torch.remainder, operator.mod),
    "floor_divide": binary("floor_divide", torch.floor_divide, operator.floordiv),
    **{
        f"bitwise_{name}": binary(f"bitwise_{name}", getattr(torch, f"bitwise_{name}"), function)
        for name, function in (("and", operator.and_), ("or", operator.or_), ("xor", operator.xor))
    },
    "bitwise_left_shift": binary("bitwise_left_shift", torch.bitwise_left_shift, operator.lshift),
    "bitwise_right_shift": binary("bitwise_right_shift", torch.bitwise_right_shift, operator.rshift),
    "abs": (None, [(abs, X), (operator.abs, X), (torch.absolute, X), ("abs", X), (aten.abs.default, X)]),
    "neg": (None, [(operator.neg, X), (torch.negative, X), ("__neg__", X), (aten.neg.default, X)]),
    "bitwise_not": (None, [(operator.invert, X), (torch.bitwise_not, X), (aten.bitwise_not.default, X)]),
    "positive": (None, [(operator.pos, X), (torch.positive, X), (aten.positive.default, X)]),
    "getitem": (None, [(operator.getitem, X, 0), ("__getitem__", X, 0)]),
    "setitem": (None, [(operator.setitem, X, 0, Y), ("__setitem__", X, 0, Y)]),
    "clamp": (
        None,
        [
            (torch.clamp, X, 0, 1),
            (torch.clip, X, {"min": 0, "max": 1}),
            ("clamp", X, 0, 1),
            (aten.clamp.default, X, 0, 1),
        ],
    ),
    "view": (None, [("view", X, 2, 3), ("view", X, (2, 3)), (aten.view.default, X, [2, 3])]),
    "reshape": (
        None,
        [("reshape", X, -1), ("reshape", X, (-1,)), (torch.reshape, X, (-1,)), (aten.reshape.default, X, [-1])],
    ),
    "permute": (None, [("permute", X, 1, 0), (torch.permute, X, (1, 0)), (aten.permute.default, X, [1, 0])]),
    "transpose": (None, [("transpose", X, 0, 1), (torch.swapaxes, X, 0, 1), (aten.transpose.int, X, 0, 1)]),
    "expand": (None, [("expand", X, 2, -1), ("expand", X, (2, -1)), (aten.expand.default, X, [2, -1])]),
    "split": (None, [("split", X, [1, 2]), (torch.split, X, [1, 2]), (aten.split_with_sizes.default, X, [1, 2])]),
    "split, equal": (None, [("split", X, 2, {"dim": 1}), (torch.split, X, 2, 1), (aten.split.Tensor, X, 2, 1)]),
    "size": (None, [("size", X), (getattr, X, "shape")]),
    "size of one": (None, [("size", X, 0), (aten.sym_size.int, X, 0)]),
    "mean": (None, [("mean", X, -1, True), (torch.mean, X, -1, {"keepdim": True}), (aten.mean.dim, X, [-1], True)]),
    "cat": (None, [(torch.cat, [X, Y]), (torch.concat, (X, Y), 0), (aten.cat.default, [X, Y])]),
    "addmm": (None, [(torch.addmm, X, X, Y), ("addmm", X, X, Y), (aten.addmm.default, X, X, Y)]),
    "scaled_dot_product_attention": (
        None,
        [
            (F.scaled_dot_product_attention, X, Y, Y, {"is_causal": True}),
            (aten.scaled_dot_product_attention.default, X, Y, Y, None, 0.0, True),
        ],
    ),
}
INPLACE: dict[str, tuple[nn.Module | None, Sequence[Call]]] = {
    "relu": (nn.ReLU(inplace=True), [(F.relu, X, True), (torch.relu_, X), ("relu_", X), (aten.relu_.default, X)]),
    "add": (None, [(operator.iadd, X, Y), ("add_", X, Y), ("__iadd__", X, Y), (aten.add_.Tensor, X, Y)]),
    "div": (None, [(operator.itruediv, X, 2), ("div_", X, 2), ("true_divide_", X, 2), (aten.div_.Tensor, X, 2)]),
    "dropout": (
        nn.Dropout(0.5, inplace=True),
        [(F.dropout, X, {"inplace": True}), (aten.dropout_.default, X, 0.5, True)],
    ),
}


def operations_of(layer: nn.Module | None, calls: Sequence[Call]) -> list[Operation]:
    """Read all spellings of a case in one graph."""
    root, graph = nn.Module(), Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    if layer is not None:
        root.add_module("layer", layer)
        graph.call_module("layer", (x,))
        graph.call_module("layer", (), {"input": x})

    def given(value: Any) -> Any:
        if isinstance(value, Read):
            return graph.get_attr(f"layer.{value}")
        if isinstance(value, list | tuple):
            return type(value)(map(given, value))
        return x if value is X else y if value is Y else value

    for target, *args in calls:
        keywords = args.pop() if args and isinstance(args[-1], dict) else {}
        kwargs = {key: given(value) for key, value in keywords.items()}
        make = graph.call_method if isinstance(target, str) else graph.call_function
        make(target, tuple(map(given, args)), kwargs)
    graph.output(x)
    index = GraphIndex(GraphModule(root, graph))
    found = [read_operation(index, node) for node in index.nodes if node.op.startswith("call_")]
    assert None not in found, [str(node.target) for node, each in zip(index.nodes[2:], found, strict=False) if not each]
    return found  # type: ignore[return-value]  # none is None


def facts_of(operation: Operation) -> object:
    """What two readings have to have in common."""
    values = {
        key: (value.name, id(value.tensor)) if isinstance(value, TensorRef) else value
        for key, value in operation.arguments.items()
    }
    return operation.name, operation.inplace, values


@pytest.mark.parametrize("name", CASES)
def test_all_forms_give_the_same(name: str) -> None:
    found = operations_of(*CASES[name])
    first = facts_of(found[0])
    assert found[0].name == name.partition(",")[0].partition(" ")[0]
    for operation in found[1:]:
        assert facts_of(operation) == first, operation.node.format_node()
    assert not found[0].inplace


@pytest.mark.parametrize("name", INPLACE)
def test_all_forms_in_place_give_the_same(name: str) -> None:
    found = operations_of(*INPLACE[name])
    for operation in found:
        assert facts_of(operation) == facts_of(found[0]) and operation.name == name and operation.inplace


def test_every_operation_of_modules_and_of_python_has_a_case() -> None:
    assert {*MODULES.values(), *_OPERATORS.values()} <= {name.partition(",")[0] for name in CASES}


@pytest.mark.parametrize("name", ["linear", "addmm", "embedding", "relu", "matmul"])
def test_the_value_that_a_call_works_on(name: str) -> None:
    for operation in operations_of(*CASES[name]):
        assert str(input_of(operation.node)) == "x"


def test_weights_say_where_they_live() -> None:
    module, _, function, *_ = operations_of(*CASES["linear"])
    for operation in (module, function):
        assert operation.arguments["weight"].name == "layer.weight"
    assert (module.module_name, type(module.module), function.module) == ("layer", nn.Linear, None)


def test_computed_weights_are_nodes() -> None:
    (found,) = operations_of(None, [(F.linear, X, Y)])
    assert isinstance(found.arguments["weight"], Node) and found.arguments["bias"] is None


def test_arguments_that_no_form_has_keep_their_names() -> None:
    (found,) = operations_of(None, [(torch.mul, X, Y, 3, {"strange": 1})])
    assert found.arguments == {"input": found.input, "other": found.node.args[1], "#2": 3, "strange": 1}


def test_what_is_no_operation_of_torch() -> None:
    class Leaky(nn.ReLU):
        pass

    hooked = nn.ReLU()
    hooked.register_forward_hook(lambda *_: None)
    for module in (nn.Sequential(), hooked, Leaky(), nn.Bilinear(1, 1, 1)):
        graph = Graph()
        call = graph.call_module("layer", (graph.placeholder("x"),))
        graph.output(call)
        root = nn.Module()
        root.add_module("layer", module)
        index = GraphIndex(GraphModule(root, graph))
        assert [read_operation(index, node) for node in index.nodes] == [None] * 3
    graph = Graph()
    x = graph.placeholder("x")
    for target in (len, max, operator.index, operator.concat, torch.ops.prims.sin.default, print):
        graph.call_function(target, (x,))
    graph.output(x)
    index = GraphIndex(GraphModule(nn.Module(), graph))
    assert not any(read_operation(index, node) for node in index.nodes)


def test_names_of_numpy_are_those_of_torch() -> None:
    """Torch's functions and methods take both."""

    class Named(nn.Module):
        def forward(self, x: Tensor) -> tuple[Any, ...]:
            function: Any = torch
            joined = function.cat((x, x), axis=1), function.cat((x, x), dim=1)
            summed = function.sum(x, axis=-1, keepdims=True), x.sum(dim=-1, keepdim=True)
            return *joined, *summed, function.squeeze(x, axis=0), x.squeeze(0), function.add(x1=x, x2=x), x + x

    graph_module = torch.fx.symbolic_trace(Named())
    index = GraphIndex(graph_module)
    (output,) = graph_module.graph.find_nodes(op="output")
    read = [read_operation(index, node) for node in output.args[0]]
    for numpy, own in zip(read[::2], read[1::2], strict=True):
        assert numpy is not None
        assert own is not None
        assert (numpy.name, dict(numpy.arguments)) == (own.name, dict(own.arguments))


@pytest.mark.parametrize("name", ["input", "x", "a"])
def test_writes_are_seen_by_all_names_of_what_is_written(name: str) -> None:
    graph = Graph()
    value = graph.placeholder("value")
    written = graph.call_function(torch.relu_, (), {name: value})
    graph.output(written)
    index = GraphIndex(GraphModule(nn.Module(), graph))
    assert index.effects.writes(written) == (value,)
    assert index.effects.aliases(written)
