"""`FuseLinears`: what goes with a product, what does not, and that nothing is lost on the way back."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from site_passes import Computes
from torch import Tensor, nn

from fxopt_checkpoints import load_original_state_dict, original_state_dict
from fxopt_core import undo
from fxopt_cpu import FuseLinears, PanelLinear, PlanRegions, isa
from fxopt_cpu.layers.epilogue import Activation
from fxopt_testing import assert_rewrites
from fxopt_testing.forms import TRACED
from fxopt_testing.rewrites import graph_of, refused

pytestmark = pytest.mark.skipif(isa() is None, reason="the library was not built")
# By day, dynamic sizes stand for fixed ones.
FORMS = [*TRACED, "export-dynamic", pytest.param("export", marks=pytest.mark.nightly)]
X = torch.randn(3, 16)


def _layers(graph_module: nn.Module) -> list[PanelLinear]:
    return [module for module in graph_module.modules() if isinstance(module, PanelLinear)]


def _runs(graph_module: nn.Module, model: nn.Module, *inputs: Tensor) -> None:
    with torch.no_grad():
        for _ in range(2):
            torch.testing.assert_close(graph_module(*inputs), model(*inputs), atol=1e-5, rtol=1e-4)


QUICK = Computes(lambda m, x: x * torch.sigmoid(1.702 * x))


@pytest.mark.parametrize(
    ("activation", "name"),
    [
        (nn.ReLU(), "relu"), (nn.ReLU6(), "hardtanh(0, 6)"), (nn.GELU(), "gelu"), (nn.GELU("tanh"), "gelu_tanh"),
        (nn.SiLU(), "silu"), (nn.Tanh(), "tanh"), (nn.Sigmoid(), "sigmoid"), (nn.Hardswish(), "hardswish"),
        (nn.Hardsigmoid(), "hardsigmoid"), (nn.Hardtanh(-2.0, 1.0), "hardtanh(-2, 1)"), (QUICK, "quick_gelu"),
        (nn.LeakyReLU(0.2), "leaky_relu(0.2, 0)"), (nn.ELU(0.5), "elu(0.5, 0)"), (nn.Softplus(), "none"),
    ],
    ids=str,
)  # fmt: skip
def test_activations(activation: nn.Module, name: str) -> None:
    model = nn.Sequential(nn.Linear(16, 33), activation).eval()
    graph_module = graph_of(model, "modules", X)
    FuseLinears()(graph_module)
    assert [str(layer.activation) for layer in _layers(graph_module)] == [name]
    _runs(graph_module, model, X)


class Block(nn.Module):
    """A product, a sum and a norm after it, as in an encoder."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(16, 16), norm

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.dense(x) + x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("norm", [nn.LayerNorm(16), nn.RMSNorm(16, eps=1e-6)], ids=lambda norm: type(norm).__name__)
def test_a_sum_and_a_norm_go_along(form: Any, norm: nn.Module) -> None:
    model = Block(norm).eval()
    nn.init.normal_(norm.weight)  # type: ignore[arg-type]
    found = assert_rewrites(FuseLinears(), model, X, count=1, form=form, others=[(torch.randn(7, 16),)])
    (layer,) = _layers(found)
    assert layer.norm.name == ("layer" if isinstance(norm, nn.LayerNorm) else "rms")
    _runs(found, model, X)
    assert not [node for node in found.graph.nodes if node.target in ("dense", "norm")]


class Gated(nn.Module):
    def __init__(self, activation: nn.Module, split: str) -> None:
        super().__init__()
        self.both, self.down, self.activation, self.split = nn.Linear(16, 48), nn.Linear(24, 16), activation, split

    def forward(self, x: Tensor) -> Any:
        both = self.both(x)
        if self.split == "chunk":
            halves: Any = both.chunk(2, -1)
            gate, up = halves[0], halves[1]
        else:
            gate, up = both.narrow(-1, 0, 24).clone(), both.narrow(-1, 24, 24)
        return self.down(up * self.activation(gate)) + x


@pytest.mark.parametrize("split", ["chunk", "narrow"])
@pytest.mark.parametrize("activation", [nn.SiLU(), nn.GELU()], ids=str)
def test_gates(activation: nn.Module, split: str) -> None:
    model = Gated(activation, split).eval()
    found = assert_rewrites(FuseLinears(), model, X, count=2)
    assert [layer.gated for layer in _layers(found)] == [True, False]
    assert len([node for node in found.graph.nodes if node.op.startswith("call")]) == 2
    _runs(found, model, X)


def test_values_that_others_read_stay() -> None:
    def function(m: Any, x: Tensor) -> Any:
        total = m.one(x) + x
        product = m.other(m.norm(total))
        return total, F.relu(product) + product.mean()

    model = Computes(function, one=nn.Linear(16, 16), other=nn.Linear(16, 8), norm=nn.LayerNorm(16)).eval()
    found = assert_rewrites(FuseLinears(), model, X, count=2)
    one, other = _layers(found)
    assert one.norm.name == "none" and other.activation == Activation()


class Broadcast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(16, 8)

    def forward(self, x: Tensor, y: Tensor) -> Any:
        return self.dense(x) + y


@pytest.mark.parametrize("shape", [(8,), (1, 8), (2, 3, 8)])
def test_sums_that_broadcast_stay(shape: tuple[int, ...]) -> None:
    model, y = Broadcast().eval(), torch.randn(*shape)
    found = assert_rewrites(FuseLinears(), model, X, y, count=1)
    assert any(node.op == "call_function" for node in found.graph.nodes)
    _runs(found, model, X, y)


def test_transposed_weights() -> None:
    model = Computes(lambda m, x: torch.addmm(m.bias, x, m.weight)).eval()
    model.weight, model.bias = nn.Parameter(torch.randn(16, 5)), nn.Parameter(torch.randn(5))
    found = assert_rewrites(FuseLinears(), model, X, count=1)
    _runs(found, model, X)


class Repeated(nn.Module):
    """The same layers several times, as in ALBERT; the last product is followed by something else each time."""

    def __init__(self, times: int = 2, affine: bool = True) -> None:
        super().__init__()
        self.times, self.block = times, Block(nn.LayerNorm(16, elementwise_affine=affine))
        self.up, self.activation, self.down = nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        for place in range(self.times):
            x = self.down(self.activation(self.up(self.block(x))))
            x = torch.relu(x) if place else torch.tanh(x)
        return x


@pytest.mark.parametrize(("form", "affine"), [("modules", True), ("modules", False), ("export-dynamic", True)])
def test_a_layer_that_is_called_several_times_is_packed_once(form: Any, affine: bool) -> None:
    model = Repeated(affine=affine).eval()
    found = assert_rewrites(FuseLinears(), model, X, count=3, form=form, others=[(torch.randn(7, 16),)])
    assert not refused(found)
    made = [(str(layer.activation), layer.norm.name) for layer in _layers(found)]
    assert sorted(made) == [("gelu", "none"), ("none", "layer"), ("none", "none")]
    assert sum(isinstance(found.get_submodule(str(node.target)), PanelLinear)
               for node in found.graph.nodes if node.op == "call_module") == 6  # fmt: skip
    _runs(found, model, X)
    if "export" not in form:  # torch's guards do not pickle
        _runs(pickle.loads(pickle.dumps(found)), model, X)
    _runs(PlanRegions()(found), model, X)


CASES: dict[str, Callable[[Any, Tensor, Tensor, Tensor], Tensor]] = {
    "norm elsewhere": lambda m, x, one, two: m.norm(one) + m.norm(two) * m.norm(x),
    "norm of two layers": lambda m, x, one, two: m.plain(one) * m.plain(m.other(two)),
    "one residual": lambda m, x, one, two: (one + x) * torch.relu(two),
    "one norm": lambda m, x, one, two: torch.relu(m.norm(torch.relu(one))) * torch.relu(two),
    "sum of both": lambda m, x, one, two: m.norm(one + two),
}


@pytest.mark.parametrize("case", CASES)
def test_what_differs_between_the_calls_stays(case: str) -> None:
    layers = {"layer": nn.Linear(16, 16), "other": nn.Linear(16, 16), "norm": nn.LayerNorm(16)}
    norm = nn.LayerNorm(16, elementwise_affine=False)
    model = Computes(lambda m, x: CASES[case](m, x, m.layer(x), m.layer(x * 2)), **layers, plain=norm).eval()
    found = graph_of(model, "modules", X)
    before = str(found.graph)
    FuseLinears()(found)
    shared = found.get_submodule("layer_panels")
    assert isinstance(shared, PanelLinear)
    assert (str(shared.activation), shared.norm.name) == ("relu" if case == "one norm" else "none", "none")
    assert not refused(found)
    _runs(found, model, X)
    undo(found)
    assert str(found.graph) == before
    assert found.get_submodule("layer").weight is not None


@pytest.mark.parametrize("cls", [Repeated, lambda: nn.Sequential(Block(nn.LayerNorm(16)), nn.Linear(16, 5))])
def test_checkpoints_go_both_ways_while_weights_are_panels(cls: Callable[[], nn.Module]) -> None:
    model, other = cls().eval(), cls().eval()
    values = {key: value.clone() for key, value in model.state_dict().items()}
    graph_module = FuseLinears()(graph_of(model, "modules", X))
    with torch.no_grad():
        expected = model(X)
        del model
        graph_module(X)
    found = original_state_dict(graph_module)
    assert found.keys() == values.keys()
    assert all(torch.equal(found[key], values[key]) for key in values)
    del found
    load_original_state_dict(graph_module, other.state_dict())
    _runs(graph_module, other, X)
    load_original_state_dict(graph_module, values)
    with torch.no_grad():
        torch.testing.assert_close(graph_module(X), expected)
    undo(graph_module)
    assert all(torch.equal(value, values[key]) for key, value in graph_module.state_dict().items())


@pytest.mark.parametrize(
    ("ends", "fused"), [(lambda x: x, False), (lambda x: F.layer_norm(x, (16,)), True)], ids=["seen", "hidden"]
)
def test_a_sum_whose_strides_are_seen_stays(ends: Callable[[Tensor], Tensor], fused: bool) -> None:
    model = Computes(lambda m, x: ends(x.transpose(1, 2) + m.lin(x.transpose(1, 2))), lin=nn.Linear(16, 16)).eval()
    x = torch.randn(2, 16, 5)
    graph_module = FuseLinears()(graph_of(model, "export-dynamic", x))
    with torch.no_grad():
        found, expected = graph_module(x), model(x)
    torch.testing.assert_close(found, expected)
    assert found.stride() == expected.stride()
    assert fused is not any(node.name.startswith("add") for node in graph_module.graph.nodes)
