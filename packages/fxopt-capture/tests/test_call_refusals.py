"""Calls that one comparison accepts are those that the full check accepts; all others are refused in its words."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from fxopt_capture import capture
from fxopt_capture.call.guards import GUARDS, InputGuards
from fxopt_core.errors import CaptureError


def checked_in_full(graph_module: GraphModule) -> GraphModule:
    """Return a copy whose calls are all checked argument by argument."""
    twin = copy.deepcopy(graph_module)
    binding: Any = twin._input_binding
    binding._plain, binding._count = frozenset(), 0
    guards: Any = twin.get_submodule(GUARDS)
    guards._passes = lambda inputs, dtype: False
    return twin


def outcome(graph_module: GraphModule, args: Any, kwargs: Any) -> object:
    """Return what a call gives: an output, or the type and message of what it raises."""
    try:
        return graph_module(*args, **kwargs)
    except Exception as error:
        return type(error), str(error)


class Options(nn.Module):
    """Takes one tensor that it needs, one that it does not, and constants."""

    def forward(self, x: Tensor, mask: Tensor | None = None, scale: float = 1.0, *, negate: bool = False) -> Tensor:
        x = x * scale if mask is None else x * mask * scale
        return -x if negate else x


class Relations(nn.Module):
    """Relates the sizes of its inputs, and converts one to the dtype of the other."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
        pairs = x.view(-1, 2, x.shape[1])
        return {"sum": x.to(y.dtype) + y, "pairs": pairs.sum(1) if x.shape[0] > 2 else pairs.mean(1)}


class Containers(nn.Module):
    """Takes containers with tensors in them."""

    def forward(self, x: Tensor, values: Any) -> tuple[Tensor, Any]:
        return x + values["a"][0] * values["a"][1], [values["b"]]


class Variadic(nn.Module):
    """Takes any number of tensors, and options by name."""

    def forward(self, first: Tensor, *others: Tensor, **options: Tensor) -> Tensor:
        return first * others[0] * options["factor"]


def ones(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return a tensor of its own; torch.export takes one that is given twice for one input."""
    return torch.ones(sizes, dtype=dtype)


def nested() -> dict[str, Any]:
    """Return a container as the model takes it."""
    return {"a": [ones(4, 3), ones(4, 3)], "b": (ones(4, 3),)}


RELATED = {"x": {0: Dim.AUTO, 1: Dim.AUTO}, "y": {0: Dim.AUTO, 1: Dim.AUTO}}
CAPTURES: dict[str, Callable[[], GraphModule]] = {
    "layer": lambda: capture(nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval(), ones(4, 3)),
    "cast layer": lambda: capture(nn.Sequential(nn.Linear(3, 3), nn.ReLU()).eval(), ones(4, 3)).double(),
    "tokens": lambda: capture(nn.Embedding(9, 3).eval(), ones(4, 3, dtype=torch.int64)),
    "options": lambda: capture(Options().eval(), (ones(4, 3), ones(4, 3))),
    "constants": lambda: capture(Options().eval(), ones(4, 3), {"scale": 2.0, "negate": True}),
    "default repeated": lambda: capture(Options().eval(), (ones(4, 3), None), {"scale": 1.0}),
    "relations": lambda: capture(Relations().eval(), (ones(4, 3), ones(4, 3)), dynamic_shapes=RELATED),
    "containers": lambda: capture(Containers().eval(), (ones(4, 3), nested())),
    "variadic": lambda: capture(Variadic().eval(), (ones(4, 3), ones(4, 3)), {"factor": ones(4, 3)}),
}
NAMES = ("x", "mask", "scale", "negate", "y", "values", "first", "input", "factor", "others_0", "other")

TENSORS = st.builds(
    lambda sizes, dtype, kind: kind(torch.ones(sizes).to(dtype)),
    st.sampled_from([(4, 3), (2, 3), (1, 3), (0, 3), (3, 3), (4, 4), (6, 5), (4,), (), (1, 4, 3)]),
    st.sampled_from([torch.float32, torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool]),
    st.sampled_from([lambda tensor: tensor] * 4 + [lambda tensor: nn.Parameter(tensor, requires_grad=False)]),
)
GOOD = st.builds(ones, st.sampled_from([2, 4, 6]), st.just(3))
CONSTANTS = st.sampled_from([None, 1.0, 2.0, 2, 1, True, False, float("nan"), "x", (1,)])
ENTRIES = st.one_of(GOOD, GOOD, TENSORS, CONSTANTS)
CONTAINERS = st.one_of(
    st.builds(
        lambda a, b, c, turned: dict(
            reversed({"a": [a, b], "b": (c,)}.items()) if turned else {"a": [a, b], "b": (c,)}
        ),
        ENTRIES,
        ENTRIES,
        ENTRIES,
        st.sampled_from([False, False, True]),
    ),
    st.builds(lambda a, b: {"a": a, "b": (b,)}, st.lists(ENTRIES, max_size=3), ENTRIES),
    st.lists(ENTRIES, max_size=2),
)
VALUES = st.one_of(GOOD, GOOD, GOOD, TENSORS, CONTAINERS, CONSTANTS)


@pytest.fixture(scope="module")
def both_ways() -> Callable[[str], tuple[GraphModule, GraphModule]]:
    """Return each capture, and a copy of it that checks all in full."""
    made: dict[str, tuple[GraphModule, GraphModule]] = {}

    def ways(name: str) -> tuple[GraphModule, GraphModule]:
        if name not in made:
            captured = CAPTURES[name]()
            made[name] = captured, checked_in_full(captured)
        return made[name]

    return ways


def agree(found: object, expected: object) -> None:
    """Compare outputs or errors, with the types of all containers."""
    leaves, spec = pytree.tree_flatten(found)
    expected_leaves, expected_spec = pytree.tree_flatten(expected)
    assert spec == expected_spec
    for leaf, other in zip(leaves, expected_leaves, strict=True):
        assert type(leaf) is type(other)
        assert torch.equal(leaf, other) and leaf.dtype == other.dtype if isinstance(leaf, Tensor) else leaf == other


def right_calls(name: str, rows: int = 6) -> list[tuple[tuple[Any, ...], dict[str, Any]]]:
    """Return calls that the captures take."""
    x, m = torch.randn(rows, 3), torch.randn(rows, 3)
    entries = {"a": [x * 2, m * 3], "b": (x + 1,)}
    calls: dict[str, list[tuple[tuple[Any, ...], dict[str, Any]]]] = {
        "layer": [((x,), {}), ((), {"input": x})],
        "cast layer": [((x.double(),), {}), ((x,), {}), ((x.bfloat16(),), {})],
        "tokens": [((x.long().abs(),), {}), ((x.abs().int(),), {})],
        "options": [((x, m), {}), ((x,), {"mask": m}), ((), {"mask": m, "x": x, "scale": None}), ((x, m, 1.0), {})],
        "constants": [((x,), {"scale": 2.0, "negate": True}), ((x, None, 2.0), {"negate": True})],
        "default repeated": [((x,), {}), ((x, None, 1.0), {}), ((x,), {"negate": False, "mask": None})],
        "relations": [((x, m), {}), ((x,), {"y": m})],
        "containers": [((x, entries), {}), ((), {"values": entries, "x": x})],
        "variadic": [((x, m), {"factor": m})],
    }
    return calls[name]


def like(value: Any) -> st.SearchStrategy[Any]:
    """Draw what stands in for one argument: mostly itself."""
    if isinstance(value, dict):
        return st.one_of(st.just(value), st.just(value), CONTAINERS)
    return st.one_of(st.just(value), st.just(value), st.just(value), GOOD, VALUES)


@st.composite
def calls_like_right_ones(draw: Any, name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Draw a right call, with some of its arguments replaced, left out, added or given under another name."""
    args, kwargs = draw(st.sampled_from(right_calls(name, draw(st.integers(0, 9)))))
    positional = [draw(like(value)) for value in args]
    named = [(key, draw(like(value))) for key, value in kwargs.items()]
    match draw(st.sampled_from(["", "", "", "less", "more", "unnamed", "named", "renamed", "turned"])):
        case "less" if positional:
            positional.pop()
        case "more":
            positional.append(draw(VALUES))
        case "unnamed" if named:
            positional.append(named.pop(0)[1])
        case "named":
            named.append((draw(st.sampled_from(NAMES)), draw(VALUES)))
        case "renamed" if named:
            named[0] = draw(st.sampled_from(NAMES)), named[0][1]
        case "turned":
            named.reverse()
    return tuple(positional), dict(named)


@pytest.mark.parametrize("name", CAPTURES)
def test_any_call_gives_the_same_either_way(
    both_ways: Callable[[str], tuple[GraphModule, GraphModule]], name: str
) -> None:
    captured, slow = both_ways(name)

    @settings(max_examples=50, deadline=None)
    @given(calls_like_right_ones(name))
    def check(call: tuple[tuple[Any, ...], dict[str, Any]]) -> None:
        expected = outcome(slow, *copy.deepcopy(call))
        agree(outcome(captured, *call), expected)

    check()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [(ones(4, 3, dtype=torch.int64), "has dtype torch.int64"), (ones(3), "has 1 dimensions"), (1.0, "is a float")],
)
def test_what_is_wrong_is_said_after_many_right_calls(wrong: object, message: str) -> None:
    captured = CAPTURES["layer"]()
    captured(ones(4, 3))
    with pytest.raises(CaptureError, match=message):
        captured(wrong)
    captured(ones(5, 3))


@pytest.mark.parametrize(
    "code", ["12 // i[0].size()[0] > 1", "i[0].size()[0] % i[0].size()[0] == 0", "i[0].dim() == 2"]
)
def test_conditions_of_other_kinds(code: str) -> None:
    captured = capture(nn.Sequential(nn.Linear(6, 6), nn.ReLU()).eval(), ones(4, 6))
    guards: Any = captured.get_submodule(GUARDS)
    captured._modules[GUARDS] = InputGuards(guards.specs, [code])
    slow = checked_in_full(captured)
    captured(ones(3, 6))
    for rows in (0, 1, 2, 5, 6, 7, 13):
        agree(outcome(captured, (ones(rows, 6),), {}), outcome(slow, (ones(rows, 6),), {}))
