"""`Pattern` and `PatternPass`: computations that are found however graphs have them, and replaced."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings, strategies as st
from site_passes import Computes
from torch import Tensor, nn
from torch.fx import GraphModule, Node, symbolic_trace

from fxopt_core import PassError, history, iter_nodes, undo
from fxopt_rewrite import (
    GraphIndex,
    LinearCall,
    Match,
    Pattern,
    PatternPass,
    TensorRef,
    infer_shapes,
    read_linear,
    tensor_facts,
)

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


class FuseRMSNorm(PatternPass):
    """The root mean square of the last dimension is divided by."""

    def pattern(self, x: Tensor, weight: nn.Parameter, eps: float) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps) * weight

    def replacement(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, eps)

    def accepts(self, match: Match, index: GraphIndex) -> bool:
        return len(match.values["weight"].tensor) == 4


class Written(nn.Module):
    """A function of a value and a weight."""

    def __init__(self, write: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.weight, self.write = nn.Parameter(torch.tensor([1.0, 2.0, 3.0, 4.0])), write

    def forward(self, x: Tensor) -> Any:
        return self.write(x, self.weight)


def rms(x: Tensor) -> Tensor:
    return torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def graph_of(model: nn.Module, form: str = "trace") -> GraphModule:
    made = torch.export.export(model.eval(), (X,)).module() if form == "export" else symbolic_trace(model.eval())
    assert isinstance(made, GraphModule)
    return infer_shapes(made, X)


def names(graph_module: GraphModule) -> list[str]:
    return [node.name for node in iter_nodes(graph_module.graph)]


def reasons(graph_module: GraphModule) -> list[str]:
    return [refusal.reason for refusal in history(graph_module)[-1].refusals]


WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "as the pattern": lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
    "weight first": lambda x, w: w * (x * torch.rsqrt(1e-6 + x.square().mean(dim=-1, keepdim=True))),
    "square root": lambda x, w: w * x / torch.sqrt((x * x).mean(dim=(-1,), keepdim=True).add(1e-6)),
    "scale first": lambda x, w: torch.mul(rms(x), w).mul(other=x),
    "reciprocal": lambda x, w: (torch.mean(x**2, -1, True) + 1e-6).sqrt().reciprocal() * x * w,
}


@pytest.mark.parametrize("form", ["trace", "export"])
@pytest.mark.parametrize("way", WAYS)
def test_ways_to_write_an_rms_norm(way: str, form: str) -> None:
    model = Written(WAYS[way])
    before = graph_of(model, form)
    given = names(before)
    fused = FuseRMSNorm()(before, expect=1, strict=True)
    (call,) = [node for node in iter_nodes(fused.graph) if node.op == "call_function" and "guard" not in node.name]
    assert call.target is F.rms_norm and call.kwargs["eps"] == 1e-6
    assert {source.pass_name for source in call.meta["from_node"]} == {"fuse-rms-norm"}
    torch.testing.assert_close(fused(X), model(X))
    torch.testing.assert_close(fused(X * float("nan")), model(X * float("nan")), equal_nan=True)
    if form == "trace":
        torch.testing.assert_close(fused(X[:0]), model(X[:0]))
    fused(X).sum().backward()
    assert model.weight.grad is not None
    assert names(undo(fused)) == given


@pytest.mark.parametrize(
    "write",
    [
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1) + 1e-6).unsqueeze(-1) * w,
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(0, keepdim=True) + 1e-6) * w,
        lambda x, w: x * torch.rsqrt(x.pow(3).mean(-1, keepdim=True) + 1e-6) * w,
        lambda x, w: x * torch.rsqrt((x * w).mean(-1, keepdim=True) + 1e-6) * w,
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True)) * w,
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) - x) * w,
        lambda x, w: x * torch.sqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
        lambda x, w: x * torch.rsqrt(torch.add(x.pow(2).mean(-1, keepdim=True), 1e-6, alpha=2)) * (w + 1),
        lambda x, w: 2 * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w,
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * w.relu(),
        lambda x, w: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True).add_(1e-6)) * w,
    ],
)
def test_what_only_looks_like_one_stays(write: Callable[[Tensor, Tensor], Tensor]) -> None:
    FuseRMSNorm()(graph_of(Written(write)), expect=0, strict=True)


def _read_between(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    scale = rms(x)
    return x * scale * w, scale


def _written_between(x: Tensor, w: Tensor) -> Tensor:
    x = x + 1
    scale = rms(x)
    x.mul_(2)
    return x * scale * w


@pytest.mark.parametrize(("write", "reason"), [(_read_between, "several-users"), (_written_between, "mutated")])
def test_refusals(write: Callable[[Tensor, Tensor], Any], reason: str) -> None:
    graph_module = FuseRMSNorm()(graph_of(Written(write)))
    assert reasons(graph_module) == [reason]
    with pytest.raises(PassError, match=reason):
        FuseRMSNorm()(graph_of(Written(write)), strict=True)


def test_dtypes() -> None:
    model = Written(WAYS["as the pattern"])
    assert reasons(FuseRMSNorm()(symbolic_trace(model))) == ["shape-unknown"]
    half = infer_shapes(symbolic_trace(model.bfloat16()), X.bfloat16())
    assert reasons(FuseRMSNorm()(half)) == ["unsupported-dtype"]
    mixed = infer_shapes(symbolic_trace(Written(WAYS["as the pattern"]).double()), X)
    assert reasons(FuseRMSNorm()(mixed)) == ["dtype-mismatch"]


class CopyTurned(PatternPass):
    """A view."""

    dtypes = ()

    def pattern(self, x: Tensor) -> Tensor:
        return x.t().t()

    def replacement(self, x: Tensor) -> Tensor:
        return torch.clone(x)


def test_a_view_that_is_returned_or_written_is_no_new_tensor() -> None:
    assert reasons(CopyTurned()(graph_of(Written(lambda x, w: x.t().t())))) == ["returned"]
    written = graph_of(Written(lambda x, w: (x.t().t().mul_(2) + x) * w))
    assert reasons(CopyTurned()(written)) == ["mutated"]
    CopyTurned()(graph_of(Written(lambda x, w: x.t().t() * w)), expect=1, strict=True)


def found(pattern: Pattern, model: Callable[..., Any]) -> list[Any]:
    index = GraphIndex(model if isinstance(model, GraphModule) else symbolic_trace(model))
    matches = [match for node in index.nodes for match in pattern.matches(index, node)]
    return [tuple(each if isinstance(each, int | float) else str(each) for each in m.values.values()) for m in matches]


def test_modules_functions_and_methods_are_one() -> None:
    pattern = Pattern(lambda x: F.gelu(x) * F.relu(x))
    for model in (lambda x: F.relu(x).mul(F.gelu(x)), lambda x: x.relu() * F.gelu(input=x, approximate="none")):
        assert found(pattern, model) == [("x",)]
    both = nn.ModuleList([nn.GELU(), nn.ReLU()])

    gated = Computes(lambda m, x: m.gelu(x) * m.relu(x), gelu=both[0], relu=both[1])
    assert found(pattern, symbolic_trace(gated)) == [("x",)]
    gated.gelu = nn.GELU("tanh")
    assert not found(pattern, symbolic_trace(gated))


def test_a_parameter_that_is_read_twice_is_one_value() -> None:
    pattern = Pattern(lambda x, y: torch.maximum(x, y) - torch.minimum(x, y))
    assert found(pattern, lambda a, b: torch.maximum(a, b) - torch.minimum(a, b)) == [("a", "b")]
    assert not found(pattern, lambda a, b: torch.maximum(a, b) - torch.minimum(b, a))
    assert not found(pattern, lambda a, b: torch.minimum(a, b) - torch.maximum(a, b))


def test_a_number_is_all_numbers_of_a_product() -> None:
    def scaled(x: Tensor, y: Tensor, scale: float) -> Tensor:
        return torch.matmul(x, y) / scale

    pattern = Pattern(scaled)
    assert found(pattern, lambda a, b: 3 * (a @ b) / 2)[-1] == ("a", "b", pytest.approx(2 / 3))
    assert [values[2] for values in found(pattern, lambda a, b: (a @ b) / 8)] == [8.0]
    assert not found(pattern, lambda a, b: (a @ b) / b)
    assert not found(pattern, lambda a, b: a @ b)


def test_a_number_is_finite() -> None:
    def quotient(x: Tensor, divisor: float) -> Tensor:
        return torch.exp(x / divisor)

    for number in (0.0, 5e-324, math.inf):
        index = GraphIndex(symbolic_trace(lambda x, number=number: torch.exp(x * number)))
        assert not [match for node in index.nodes for match in Pattern(quotient).matches(index, node)]
    index = GraphIndex(symbolic_trace(lambda x: torch.exp(x + math.inf - math.inf)))
    assert not [match for node in index.nodes for match in Pattern(quotient).matches(index, node)]


def test_annotations() -> None:
    def scaled(layer: Annotated[Tensor, read_linear], factor: float) -> Tensor:
        return layer * factor

    index = GraphIndex(
        symbolic_trace(Computes(lambda m, x: m.fc(x) * 0.5 + F.linear(x, m.fc.weight, m.fc.bias), fc=nn.Linear(4, 4)))
    )
    (match,) = [match for node in index.nodes for match in Pattern(scaled).matches(index, node)]
    assert isinstance(match.values["layer"], LinearCall) and match.values["factor"] == 0.5
    kinds = {"w": nn.Parameter, "b": nn.Parameter | None}
    linear = Pattern(lambda x, w, b: F.linear(x, w, b), kinds=kinds)
    calls = [match.values for node in index.nodes for match in linear.matches(index, node)]
    assert [[type(each) for each in values.values()] for values in calls] == [[Node, TensorRef, TensorRef]] * 2
    assert [values["w"].name for values in calls] == ["fc.weight"] * 2


def test_what_may_lie_between() -> None:
    pattern = Pattern(lambda x, y: torch.exp(x + y), through={"view", "float"})
    assert found(pattern, lambda a, b: (a.view(-1) + b.float()).view(2, 2).exp())[0] == ("view", "float_1")
    assert not found(pattern, lambda a, b: (a + b).half().exp())


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda x, y: x.relu(), "does not use `y`"),
        (lambda x: x.relu_(), "write nothing"),
        (lambda x: x, "return what an operation"),
        (lambda x: 3, "does not use `x`"),
    ],
)
def test_what_is_no_pattern(function: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Pattern(function)


class Replaces(PatternPass):
    """``exp(x * w)`` -> whatever is given."""

    def __init__(self, write: Callable[..., Any]) -> None:
        self.write = write

    def patterns(self) -> Sequence[Pattern]:
        return [Pattern(lambda x, w: torch.exp(x * w), self.write, kinds={"w": nn.Parameter})]


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda x, w: x, "return the tensor"),
        (lambda x, w: x * w.exp(), "not compute new ones"),
        (lambda x, w: 2, "return the tensor"),
    ],
)
def test_what_is_no_replacement(write: Callable[..., Any], message: str) -> None:
    model = Written(lambda x, w: (x * w).exp())
    graph_module = graph_of(model)
    before = names(graph_module)
    with pytest.raises(PassError, match=message):
        Replaces(write)(graph_module)
    assert names(graph_module) == before


def test_replacements_of_several_calls_are_described() -> None:
    graph_module = graph_of(Written(lambda x, w: (x * w).exp().relu()))
    Replaces(lambda x, w: torch.pow(2.718281828, x.mul(w).clone(memory_format=torch.contiguous_format)))(
        graph_module, expect=1
    )
    assert all("val" in node.meta or "tensor_meta" in node.meta for node in list(graph_module.graph.nodes)[:-1])
    torch.testing.assert_close(graph_module(X), (X * torch.tensor([1.0, 2.0, 3.0, 4.0])).exp().relu())


class ClampLayers(PatternPass):
    """Parameters that a module holds are read by nodes of their own."""

    def pattern(self, x: Tensor, weight: nn.Parameter, bias: nn.Parameter | None) -> Tensor:
        return F.relu(F.linear(x, weight, bias))

    def replacement(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias).clamp(min=0)


@pytest.mark.parametrize("bias", [True, False])
def test_modules_with_parameters(bias: bool) -> None:
    model = nn.Sequential(nn.Linear(4, 3, bias=bias), nn.ReLU())
    before = graph_of(model)
    given, keys = names(before), [*before.state_dict()]
    clamped = ClampLayers()(before, expect=1, strict=True)
    read = [node for node in iter_nodes(clamped.graph) if node.op == "get_attr"]
    assert [node.target for node in read] == ["0.weight", "0.bias"][: len(read)] and len(read) == 1 + bias
    described = tensor_facts(read[0])
    assert described is not None and described.shape == (3, 4)
    assert [*clamped.state_dict()] == keys
    torch.testing.assert_close(clamped(X), model(X))
    assert names(undo(clamped)) == given and torch.equal(clamped(X), model(X))


class FuseAdditions(PatternPass):
    """The first pattern that matches counts, and the largest match of those that overlap."""

    def patterns(self) -> Sequence[Pattern]:
        of_three = Pattern(lambda a, b, c: F.relu(a + b + c), lambda a, b, c: torch.stack((a, b, c)).sum(0))
        return [of_three, Pattern(lambda a, b: F.relu(a + b), lambda a, b: torch.stack((a, b)).sum(0))]


@pytest.mark.parametrize(("terms", "stacked"), [(2, 2), (3, 3), (4, 3)])
def test_the_largest_match(terms: int, stacked: int) -> None:
    model = Written(lambda x, w: F.relu(sum([x * each for each in range(1, terms)], w)))
    fused = FuseAdditions()(graph_of(model), expect=1)
    (stack,) = [node for node in iter_nodes(fused.graph) if node.target is torch.stack]
    assert len(stack.args[0]) == stacked  # type: ignore[arg-type]


def _arranged(draw: st.DrawFn, values: list[str], sign: str) -> str:
    """Draw an order of operands, and parentheses."""
    values = draw(st.permutations(values))
    while len(values) > 1:
        place = draw(st.integers(0, len(values) - 2))
        values = [*values[:place], f"({values[place]} {sign} {values[place + 1]})", *values[place + 2 :]]
    return values[0]


@st.composite
def written(draw: st.DrawFn) -> str:
    inner = _arranged(draw, ["2.0", "x.exp()", "y"], "+")
    return _arranged(draw, ["0.5", "x", "y", f"torch.tanh({inner})", "4.0"], "*")


PRODUCTS = Pattern(lambda x, y: x * y * torch.tanh(torch.exp(x) + y + 2) * 2)


@settings(max_examples=settings().max_examples // 4)
@given(written())
def test_sums_and_products_match_in_any_order_and_grouping(text: str) -> None:
    names: dict[str, Any] = {"torch": torch}
    exec(f"def model(x, y):\n    return {text}", names)
    index = GraphIndex(symbolic_trace(names["model"]))
    matches = [match for node in index.nodes for match in PRODUCTS.matches(index, node)]
    assert matches and matches[-1].root.name == index.nodes[-1].args[0].name  # type: ignore[union-attr]
    assert [str(each) for each in matches[-1].values.values()] == ["x", "y"]


def test_time_is_linear_in_long_sums_and_products() -> None:
    def long(x: Tensor) -> Tensor:
        y = x
        for place in range(300):
            y = (y + x) * 1.5 if place % 2 else y * x * 0.5
        return y

    index = GraphIndex(symbolic_trace(long))
    pattern = Pattern(lambda a, b, c: a * b * torch.exp(c))
    assert not [match for node in index.nodes for match in pattern.matches(index, node)]
