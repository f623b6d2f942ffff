"""Graphs that a pass could get wrong: what they read, write and return, and where they run."""

from __future__ import annotations

import copy
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from live_models import Attention, agrees, compiled, fast_calls, images, network, rewrites, running, same
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxopt_compile


class Writing(Attention):
    """Writes its input between two layers that read it."""

    def forward(self, x: Tensor) -> Any:
        q = self.q(x)
        x.mul_(2)
        return q + self.k(x)


class Aliases(Attention):
    """Returns its input, views of it, a weight, and what is computed of it."""

    def forward(self, x: Tensor) -> Any:
        return x, x[0], x.view(-1), self.q.weight, self.q(x), self.k(x)


class WritesWeights(Attention):
    """Writes a weight between two uses of it."""

    def forward(self, x: Tensor) -> Any:
        before = self.q(x) + self.k(x)
        self.q.weight.mul_(0.5)
        return before + self.q(x)


class WritesWeightFirst(Attention):
    """Writes a weight before it is used."""

    def forward(self, x: Tensor) -> Any:
        self.q.weight.add_(1)
        return self.q(x) + self.k(x)


class Counts(Attention):
    """Counts its calls in a buffer, of which the result depends."""

    count: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Any:
        self.count += 1
        return self.q(x) * self.count + self.k(x)


class Dropping(Attention):
    """Drops and draws at random."""

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.q(x), self.k(x)
        return torch.dropout(q, 0.5, True) + torch.rand_like(k) * torch.nn.functional.dropout(k, 0.3, self.training)


class Kinds(Attention):
    """Takes integers, complex numbers, Python numbers and strings."""

    def forward(  # type: ignore[override]  # a test calls it
        self, x: Tensor, index: Tensor, z: Tensor, factor: float = 2.0, how: str = "add"
    ) -> Any:
        q, k = self.q(x), self.k(x)
        return {"q": q[index] * factor, "z": (z * z.conj()).abs(), how: [k, None, 3]}


class Scaled(nn.Module):
    """A tensor that is no parameter, a module list, and a layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.plain = torch.randn(8)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(layer(x)) * self.plain
        return x


class Meddling(nn.Module):
    """Has names that torch uses itself."""

    def __init__(self) -> None:
        super().__init__()
        self.graph, self.code, self.training_ = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x: Tensor) -> Any:
        return self.graph(x) + self.code(x) + self.training_(x) * self.weight


CASES: dict[str, tuple[type[nn.Module], tuple[Any, ...]]] = {
    "writes its input": (Writing, ()),
    "returns aliases": (Aliases, ()),
    "writes a weight": (WritesWeights, ()),
    "writes a weight first": (WritesWeightFirst, ()),
    "counts": (Counts, ()),
    "random": (Dropping, ()),
    "kinds of inputs": (Kinds, (torch.tensor([0, 1]), torch.randn(3, dtype=torch.complex64))),
    "plain tensors": (Scaled, ()),
    "names of torch's": (Meddling, ()),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize(("cls", "more"), CASES.values(), ids=CASES)
def test_results_and_effects_are_those_of_eager(cls: type[nn.Module], more: tuple[Any, ...], training: bool) -> None:
    """Call by call, with what is written and which random numbers are drawn."""
    net = cls().train(training)
    twin, fast = copy.deepcopy(net), compiled(net)
    for _ in range(3):
        one, two = torch.ones(2, 3, 8), torch.ones(2, 3, 8)
        with torch.no_grad():
            torch.manual_seed(1)
            found = fast(one, *more)
            torch.manual_seed(1)
            same((found, one, net.state_dict()), (twin(two, *more), two, twin.state_dict()))


def test_outputs_that_alias_do_so_still() -> None:
    """The input itself, views of it, and the model's own weight."""
    net, x = Aliases().eval(), torch.randn(2, 3, 8)
    with torch.no_grad():
        first, row, flat, weight, q, k = compiled(net)(x)
    assert first is x
    assert row.data_ptr() == flat.data_ptr() == x.data_ptr()
    assert weight is net.q.weight
    assert q.untyped_storage().data_ptr() != k.untyped_storage().data_ptr() or q.data_ptr() != k.data_ptr()


def test_a_weight_that_is_also_an_input() -> None:
    """A write into it through the input is a write into the weight."""

    class Both(Attention):
        def forward(self, x: Tensor, w: Tensor) -> Tensor:  # type: ignore[override]  # a test calls it
            w.mul_(2)
            result: Tensor = self.q(x) + self.k(x)
            return result

    net, x = Both().eval(), torch.randn(2, 3, 8)
    twin, fast = copy.deepcopy(net), compiled(net)
    with torch.no_grad():
        for _ in range(3):
            same(fast(x, net.q.weight), twin(x, twin.q.weight))
            same(fast(x, net.k.weight[:2]), twin(x, twin.k.weight[:2]))


def test_sizes_that_change() -> None:
    """Dynamo makes sizes symbolic, and they are inputs then."""
    net = network()
    fast = compiled(net, "fold-batch-norm,merge-linears")
    for batch, size in ((2, 6), (3, 9), (1, 5), (2, 6)):
        agrees(fast, net, images(batch, size))
    with torch.no_grad():
        net.attention.q.weight.add_(1)
    agrees(fast, net, images(3, 7))
    assert len(fxopt_compile.history(net)) <= 4


def test_models_on_meta() -> None:
    """Nothing has values."""
    net = network().to("meta")
    with torch.no_grad():
        for _ in range(3):
            assert compiled(net)(images().to("meta")).shape == (2, 16, 8)
    assert rewrites(net)["merge-linears"] == 1


def test_autocast() -> None:
    """Weights are derived in their own dtype, whatever the call computes in."""
    net, x = network(), images()
    fast = compiled(net)
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(fast(x), net(x), rtol=5e-2, atol=5e-2)
            net.get_buffer("norm.running_mean").add_(1)
        agrees(fast, net, x)


def test_transforms_and_modes() -> None:
    """Under them the graph runs as dynamo made it."""
    net, fast, x = running(Attention().eval(), torch.randn(2, 3, 8))
    calls = fast_calls()
    seen: list[Any] = []

    class Watching(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func)
            return func(*args, **(kwargs or {}))

    with torch.no_grad(), Watching():  # type: ignore[no-untyped-call]  # untyped in torch
        same(fast(x), net(x))
    assert seen
    expected = torch.func.grad(lambda y: net(y).sum())(x)
    same(torch.func.grad(lambda y: fast(y).sum())(x), expected)
    same(torch.func.vmap(fast)(x), torch.func.vmap(net)(x))
    assert fast_calls() - calls <= 3


def test_hooks_run() -> None:
    """Of layers that passes replace: dynamo traces them."""
    net = Attention().eval()
    net.q.register_forward_hook(lambda module, inputs, output: output + 1)
    net.k.register_forward_pre_hook(lambda module, inputs: (inputs[0] * 3,))
    _, fast, x = running(net, torch.randn(2, 3, 8))
    net.q.register_forward_hook(lambda module, inputs, output: output * 2)
    agrees(fast, net, x)


def test_threads() -> None:
    """Weights change while no thread runs; then all run at once, and each sees them."""
    net, fast, x = running(network(), images())

    def work(start: threading.Barrier, expected: Tensor) -> None:
        start.wait(60)
        with torch.no_grad():
            for _ in range(5):
                same(fast(x), expected)

    for _ in range(3):
        with torch.no_grad():
            net.attention.q.weight.add_(1)
            net.get_buffer("norm.running_mean").add_(1)
            expected = net(x)
        start = threading.Barrier(4)
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, [start] * 4, [expected] * 4))


def test_functions_and_closures() -> None:
    """Parameters need no module."""
    weights = [nn.Parameter(torch.randn(8, 8)) for _ in range(3)]

    def function(x: Tensor) -> Tensor:
        q, k, v = (torch.nn.functional.linear(x, weight) for weight in weights)
        return q * k + v

    fast, x = compiled(function), torch.randn(2, 8)
    agrees(fast, function, x)
    with torch.no_grad():
        weights[0].add_(1)
    agrees(fast, function, x)
    weights[1] = nn.Parameter(torch.randn(8, 8))
    agrees(fast, function, x)
    assert sum(graph.rewritten for graph in fxopt_compile.history()) > 0


def test_models_without_weights() -> None:
    """There is nothing to rewrite, and nothing to keep."""
    fast = compiled(nn.Sequential(nn.ReLU(), nn.Flatten()))
    agrees(fast, lambda x: torch.relu(x).flatten(1), torch.randn(2, 3, 4))
    with torch.no_grad():
        assert compiled(lambda: torch.ones(2) + 1)().tolist() == [2, 2]


def test_a_subclass_is_left_alone() -> None:
    """Its values need not be what they seem."""

    class Doubled(Tensor):
        pass

    net, x = Attention().eval(), torch.randn(2, 3, 8)
    fast = compiled(net)
    with torch.no_grad():
        same(fast(x.as_subclass(Doubled)).as_subclass(Tensor), net(x))
    reasons = [graph.reason.reason for graph in fxopt_compile.history(net) if graph.reason]
    assert reasons == ["sharded"]


def test_two_models_in_one_function() -> None:
    """Their weights have the same names."""
    one, two = network(), network()

    def both(x: Tensor) -> Tensor:
        return torch.add(one(x), two(x))

    agrees(compiled(both), both, images())
    assert fxopt_compile.history(one)[0].rewritten
