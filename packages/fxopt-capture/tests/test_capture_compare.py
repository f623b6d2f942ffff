"""A graph that capture returns runs, and does on the example what the model does; else there is a CaptureError."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxopt_capture import capture, symbolic_trace
from fxopt_core.errors import CaptureError

X = torch.linspace(-1, 1, 8).view(2, 4)


class Deceiving(nn.Module):
    """Does something else while it is exported."""

    def __init__(self, usually: Callable[[Tensor], Any], exported: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))
        self.scale = nn.Parameter(torch.ones(4))
        self.usually, self.exported = usually, exported

    def forward(self, x: Tensor) -> Any:
        x = x * self.scale
        return self.exported(x) if torch.compiler.is_exporting() else self.usually(x)


WRONG: dict[str, tuple[Callable[[Tensor], Any], Callable[[Tensor], Any], str]] = {
    "one of several outputs by 5 %": (
        lambda x: {"left": x, "right": [x, x + 2]},
        lambda x: {"left": x, "right": [x, 1.05 * (x + 2)]},
        r"output\['right'\]\[1\] differs in 8 elements, .*found 3.15, expected 3 within 0.00033 .* error 0.15",
    ),
    "dtype": (lambda x: x, lambda x: x.double(), "output has dtype torch.float64, expected torch.float32"),
    "list for a tuple": (lambda x: [x, x], lambda x: (x, x), "output is a tuple of 2 where .* returns a list of 2"),
    "keys": (lambda x: {"a": x}, lambda x: {"b": x}, r"with the keys \['b'\] where .* with the keys \['a'\]"),
    "sizes": (lambda x: x.shape, lambda x: x.shape, "output is a tuple of 2 where the model returns a Size of 2"),
    "tensor for a list": (lambda x: [x], lambda x: x, "output is a tensor or constant where .* a list of 1"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_graph_that_computes_something_else_is_refused(name: str) -> None:
    usually, exported, reason = WRONG[name]
    model = Deceiving(usually, exported).eval()
    with pytest.raises(CaptureError, match=f"graph of Deceiving does not compute what .* on the example: .*{reason}"):
        capture(model, X)


def test_skipping_the_comparison() -> None:
    model = Deceiving(lambda x: x, lambda x: x + 1).eval()
    assert torch.equal(capture(model, X, compare=False)(X), X + 1)
    assert torch.equal(symbolic_trace(model, example_inputs=X, disable_check=True)(X), X + 1)
    with pytest.raises(CaptureError, match="compare=False returns the graph anyway"):
        symbolic_trace(model, example_inputs=X)


class Writing(nn.Module):
    """Writes to its input and to a buffer, other values while it is exported if asked to."""

    count: Tensor

    def __init__(self, *, to_input: float = 1, to_buffer: float = 1) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(4))
        self.to_input, self.to_buffer = to_input, to_buffer

    def forward(self, x: Tensor) -> Tensor:
        exporting = torch.compiler.is_exporting()
        y = x * 2
        x.add_(self.to_input if exporting else 1)
        self.count.add_(self.to_buffer if exporting else 1)
        return y


def test_what_a_call_writes_is_compared() -> None:
    with pytest.raises(CaptureError, match=r"after the call, the input\['x'\] differs in 8 .* error 1,"):
        capture(Writing(to_input=2), X)
    with pytest.raises(CaptureError, match=r"after the call, the buffer\['count'\] differs in 4 .* error 2,"):
        capture(Writing(to_buffer=3), X)


def test_model_and_example_are_left_as_they_were() -> None:
    model, x = Writing(), X.clone()
    captured = capture(model, x)
    assert torch.equal(x, X)
    assert model.count.tolist() == [0] * 4
    assert model.count._version == x._version == 0
    assert torch.equal(captured(x), X * 2)
    assert torch.equal(x, X + 1)
    assert model.count.tolist() == [1] * 4


class Raising(nn.Module):
    """Cannot be called on some values, or its graph cannot."""

    def __init__(self, *, exported: bool) -> None:
        super().__init__()
        self.exported = exported

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting() == self.exported:
            torch._assert_async((x > 5).all())
        return x * 2


def test_a_graph_that_cannot_run_is_refused() -> None:
    with pytest.raises(CaptureError, match="the graph of Raising cannot be called with the example: RuntimeError: "):
        capture(Raising(exported=True), X)
    assert torch.equal(capture(Raising(exported=True), X + 8)(X + 8), X * 2 + 16)


def test_an_example_that_the_model_does_not_take_is_refused() -> None:
    with pytest.raises(CaptureError, match="Embedding itself cannot be called with the example: IndexError: index out"):
        capture(nn.Embedding(4, 2), torch.tensor([[5, 0]]))
    captured = capture(nn.Embedding(4, 2), torch.tensor([[5, 0]]), compare=False)
    assert captured(torch.tensor([[3, 0]])).shape == (1, 2, 2)


class Random(nn.Module):
    """Draws random numbers of all kinds, some of which a graph draws too."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = nn.Dropout(0.5)
        self.drawn: list[float] = []

    def forward(self, x: Tensor) -> Any:
        self.drawn.append(random.random())
        return self.drop(x) + torch.rand_like(x) + torch.randn(4)


def test_random_models_are_compared_with_the_same_numbers_and_the_random_state_stays() -> None:
    numpy = pytest.importorskip("numpy")
    model = Random().train()
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    expected = torch.rand(2), random.random(), numpy.random.rand()
    torch.manual_seed(1), random.seed(1), numpy.random.seed(1)
    captured = capture(model, X)
    assert torch.equal(torch.rand(2), expected[0])
    assert (random.random(), numpy.random.rand()) == expected[1:]
    assert model.drawn == []
    torch.manual_seed(2)
    found = captured(X)
    torch.manual_seed(2)
    assert torch.equal(found, model(X))


RIGHT: dict[str, Callable[[Tensor], Any]] = {
    "nan and infinity": lambda x: (x / x.relu(), x.log(), 0 / (x - x)),
    "python numbers": lambda x: (x, 2.5, "text", None),
    "nothing": lambda x: x[:0],
    "float8": lambda x: x.to(torch.float8_e4m3fn),
    "half": lambda x: (x.half(), x.bfloat16(), x.double(), x.to(torch.complex64)),
    "views of the input": lambda x: (x, x.view(-1), x[0]),
}


def test_right_graphs_are_returned() -> None:
    functions = {**RIGHT, **{name: usually for name, (usually, _, _) in WRONG.items() if name != "sizes"}}

    def everything(x: Tensor) -> dict[str, Any]:
        return {name: function(x) for name, function in functions.items()}

    assert list(capture(Deceiving(everything, everything).eval(), X)(X)) == list(functions)


def test_layers_that_compute_otherwise_without_gradients() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
    model = nn.TransformerEncoder(layer, 1).eval()
    padding = torch.zeros(2, 4, dtype=torch.bool)
    padding[1, 3:] = True
    captured = capture(model, kwargs={"src": torch.randn(2, 4, 8), "src_key_padding_mask": padding})
    x = torch.randn(2, 4, 8)
    torch.testing.assert_close(captured(src=x, src_key_padding_mask=padding), model(x, src_key_padding_mask=padding))


class Branching(nn.Module):
    """Does something else for one row."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 3 if x.size(0) == 1 else x + x.mean(0)


def test_a_graph_that_is_not_valid_for_an_example_of_one_is_compared_on_two() -> None:
    captured = capture(Branching(), X[:1], dynamic_shapes={"x": {0: torch.export.Dim.AUTO}})
    assert torch.equal(captured(X), Branching()(X))
    with pytest.raises(CaptureError, match="valid for inputs with"):
        captured(X[:1])


def test_the_model_is_called_twice_more_for_the_comparison() -> None:
    calls = {}
    for compare in (True, False):
        real: list[bool] = []
        model = nn.Linear(4, 4)
        model.register_forward_pre_hook(lambda module, args, real=real: real.append(type(args[0]) is Tensor))
        capture(model, X, compare=compare)
        calls[compare] = sum(real)
    assert calls[True] == calls[False] + 2


class Mapped(nn.Module):
    """Calls torch.vmap, which enters and leaves a level by calls whose result nothing reads."""

    def forward(self, x: Tensor) -> Any:
        return torch.vmap(lambda row: row * row.sum())(x)


def test_levels_of_vmap_are_no_dead_code() -> None:
    captured = capture(Mapped(), X)
    for x in (X, torch.randn(5, 4)):
        torch.testing.assert_close(captured(x), Mapped()(x))
    captured.graph.eliminate_dead_code()
    captured.recompile()
    torch.testing.assert_close(captured(X), Mapped()(X))


def test_containers_of_arguments_that_are_baked_in_are_left_as_they_were() -> None:
    class Taking(nn.Module):
        def forward(self, x: Tensor, names: list[str], notes: dict[str, Any]) -> Tensor:
            notes["deep"].append(names.pop())
            return x * len(names)

    names = ["a", "b", "c"]
    notes: dict[str, list[str]] = {"deep": []}
    for compare in (False, True):
        captured = capture(Taking(), (X, names, notes), compare=compare)
        assert (names, notes) == (["a", "b", "c"], {"deep": []})
        assert torch.equal(captured(X, ["a", "b", "c"], {"deep": []}), X * 2)
