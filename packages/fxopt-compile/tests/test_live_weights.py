"""Weights of compiled models are live: trained, shared, quantized, freed."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from live_models import EVERYTHING, Attention, Net, agrees, compiled, images, network, rewrites, running, same
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils import swap_tensors

import fxopt_compile
from fxopt_compile.backend import GRAPHS


def test_training_mode_and_back() -> None:
    """Statistics that training moved are those of the next evaluation."""
    net, fast, x = running(network(), images())
    twin = copy.deepcopy(net)
    for _ in range(2):
        net.train(), twin.train()
        with torch.no_grad():
            same(fast(x), twin(x))
        same(dict(net.named_buffers()), dict(twin.named_buffers()))
        net.eval(), twin.eval()
        agrees(fast, twin, x)


def test_other_dtypes_and_back() -> None:
    """Dynamo compiles anew for another dtype, and the first graph is right when its dtype is back.

    Meanwhile, it holds nothing.
    """
    net, fast, x = running(network(), images())
    net.double()
    agrees(fast, net, x.double())
    assert [len(graph._bindings) for graph in sorted(GRAPHS, key=lambda graph: graph.number)] == [0, 1]
    with torch.no_grad():
        net.attention.q.weight.add_(1)
    agrees(fast, net, x.double())
    net.float()
    agrees(fast, net, x)


def test_weights_that_change_at_every_call_cost_nothing() -> None:
    """What is made of weights is made again when they come a second time."""
    net, fast, x = running(network(), images())
    with torch.no_grad():
        for _ in range(4):
            net.attention.q.weight.add_(0.1)
            same(fast(x), net(x))
    (graph,) = fxopt_compile.history(net)
    assert (graph.plain_calls, graph.refreshes) == (4, 0)


def test_other_weights_at_every_call() -> None:
    """`functional_call` with other tensors each time runs dynamo's own graph."""
    net, x = network(), images()
    fast = compiled(net)
    with torch.no_grad():
        for _ in range(3):
            weights = {name: torch.rand_like(each) for name, each in net.named_parameters()}
            found = torch.func.functional_call(fast, {f"_orig_mod.{name}": each for name, each in weights.items()}, x)
            same(found, torch.func.functional_call(net, weights, x))
    agrees(fast, net, x)


def test_models_that_share_weights_live_side_by_side() -> None:
    """Two compiled ones, with different passes, and eager."""
    net, x = network(), images()
    other = Net().eval()
    other.attention, other.conv = net.attention, net.conv
    one, two = compiled(net), compiled(other, "merge-linears")
    for _ in range(2):
        agrees(one, net, x)
        agrees(two, other, x)
        with torch.no_grad():
            net.attention.q.weight.mul_(2)


def test_layers_that_share_a_graph_have_their_own_weights() -> None:
    """Dynamo makes one graph of equal blocks that are compiled one by one."""
    net = nn.Sequential(*(Attention() for _ in range(4))).eval()
    x = torch.randn(2, 5, 8)
    with torch.no_grad():
        expected = net(x)
    for block in net:
        block.compile(backend="fxopt", options={"pipeline": EVERYTHING})
    with torch.no_grad():
        for _ in range(4):
            same(net(x), expected)
    (graph,) = fxopt_compile.history(net)
    assert (graph.calls, graph.plain_calls) == (13, 3)
    plain = copy.deepcopy(net)
    with torch.no_grad():
        net.get_parameter("2.q.weight").add_(1), plain.get_parameter("2.q.weight").add_(1)
    agrees(net, fxopt_compile.undo(plain), x)


def test_parameters_that_are_views_of_one_tensor() -> None:
    """A write through one of them, or through the whole, is seen."""
    whole, net = torch.randn(24, 8), Attention().eval()
    for place, layer in enumerate((net.q, net.k, net.v)):
        layer.weight = nn.Parameter(whole[8 * place : 8 * place + 8])
    _, fast, x = running(net, torch.randn(2, 5, 8))
    whole.mul_(2)
    agrees(fast, net, x)


def test_quantized_weights_are_made_again() -> None:
    """Passes that approximate keep their promise for the new weights."""
    net, x = Attention(64).eval(), torch.randn(4, 20, 64)
    fast = compiled(net, "fuse-linears{weights='int8' min-weights=0}")
    with torch.no_grad():
        for _ in range(2):
            for _ in range(3):
                assert (fast(x) - net(x)).norm() < 0.1 * net(x).norm()
            net.o.weight.copy_(torch.randn(64, 64))
    (graph,) = fxopt_compile.history(net)
    assert graph.rewritten == 4
    assert graph.refreshes == 1


@pytest.mark.parametrize(("parametrization", "dynamic"), [(weight_norm, False), (spectral_norm, True)])
def test_weights_computed_from_weights_are_made_again(parametrization: Callable[..., nn.Module], dynamic: bool) -> None:
    """A parametrized layer reads one weight, which follows the tensors that it is computed from."""
    model = nn.Sequential(parametrization(nn.Conv2d(2, 4, 3)), nn.ReLU()).eval()
    net, fast, x = running(model, torch.randn(2, 2, 8, 8), dynamic=dynamic)
    for weight in (*net.parameters(), *net.buffers()):
        with torch.no_grad():
            weight.mul_(1.5)
        agrees(fast, net, x)
    assert rewrites(net) == {"fold-weights": 1, "fuse-convolutions": 1}


def test_tables_that_are_made_of_buffers() -> None:
    """What no input decides is computed once, until a buffer changes."""

    class Masked(Attention):
        mask: Tensor

        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.rand(5, 5))

        def forward(self, x: Tensor) -> Any:
            bias = torch.tril(self.mask.exp() + torch.ones(5, 5))
            return torch.softmax(self.q(x) @ self.k(x).mT + bias, -1)

    net, x = Masked().eval(), torch.randn(2, 5, 8)
    fast = compiled(net, "simplify,merge-linears")
    for _ in range(2):
        agrees(fast, net, x)
        net.mask.add_(1)
        agrees(fast, net, x)
        net.mask = torch.rand(5, 5)
    assert any(record.pass_name == "cache-shape-tables" for record in fxopt_compile.history(net)[0].records)


def test_a_fold_that_becomes_infinite_is_taken_back() -> None:
    """The pass would refuse such weights."""
    net, fast, x = running(network(), images())
    with torch.no_grad():
        net.norm.weight.fill_(1e30)
        net.conv.weight.mul_(1e20)
        for _ in range(3):
            found, expected = fast(x), net(x)
            torch.testing.assert_close(found, expected, equal_nan=True)


def test_tensors_can_be_swapped() -> None:
    """Nothing refers weakly to parameters, which torch would refuse."""
    net, fast, x = running(network(), images())
    assert not any(map(weakref.getweakrefs, (*net.parameters(), *net.buffers())))
    weight = net.attention.q.weight
    swap_tensors(weight, nn.Parameter(2 * weight.detach()))  # type: ignore[no-untyped-call]  # untyped in torch
    agrees(fast, net, x)
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net.double()
        agrees(fast, net, x.double())
        net.float()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)
    agrees(fast, net, x)


def test_weights_made_in_inference_mode_are_left_alone() -> None:
    """They have no version."""
    with torch.inference_mode():
        net = network()
        x = images()
    fast = compiled(net)
    with torch.inference_mode():
        same(fast(x), net(x))
        net.attention.q.weight.add_(1)
        same(fast(x), net(x))


def test_compiling_in_inference_mode_makes_no_inference_tensors() -> None:
    """Later calls without it run the same rewritten graph, and see changes."""
    net, x = network(), images()
    fast = compiled(net)
    for _ in range(2):
        with torch.inference_mode():
            for _ in range(3):
                same(fast(x), net(x))
            net.get_buffer("norm.running_mean").add_(1)
        agrees(fast, net, x)


# --- Memory


def test_nothing_outlives_the_model() -> None:
    """Neither the model's weights nor what was made of them."""
    net, fast, _ = running(network(), images())
    parameters: list[Any] = [weakref.ref(each) for each in (*net.parameters(), *net.buffers())]
    graphs = list(GRAPHS)
    bindings: list[Any] = [weakref.ref(binding) for graph in graphs for binding in graph._bindings]
    assert bindings
    del net, fast
    gc.collect()
    assert not [each for each in (*parameters, *bindings) if each() is not None]


def test_a_replaced_parameter_is_freed() -> None:
    """What was made of it goes with it at the next full collection, without a call in between."""
    net, fast, x = running(network(), images())
    former = weakref.ref(net.attention.q.weight)
    net.attention.q.weight = nn.Parameter(torch.randn(8, 8))
    gc.collect()
    assert former() is None
    assert not [binding for graph in GRAPHS for binding in graph._bindings]
    agrees(fast, net, x)


def test_the_model_is_not_changed() -> None:
    """No parameter is moved, wrapped or replaced, and no attribute is left on it."""
    net, x = network(), images()
    before = {name: (id(each), each.data_ptr(), each._version) for name, each in net.named_parameters()}
    keys, attributes = list(net.state_dict()), {name: set(vars(each)) for name, each in net.named_modules()}
    agrees(compiled(net), net, x)
    assert {name: (id(each), each.data_ptr(), each._version) for name, each in net.named_parameters()} == before
    assert list(net.state_dict()) == keys
    (binding,) = next(iter(GRAPHS))._bindings
    shared = {tensor.data_ptr() for tensor in binding._module.parameters()}
    assert net.attention.o.weight.data_ptr() in shared  # the packed layer has no copy of it
    added = [vars(each).keys() - attributes[name] for name, each in net.named_modules()]
    assert set().union(*added) <= {"_is_torch_compile"}  # which torch.compile sets
