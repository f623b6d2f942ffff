"""Calls that go straight to the operators: what they cost, what they give, and who sees them."""

from __future__ import annotations

import copy
import operator
import pickle
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from direct_watching import functions_called, goes_directly, outcome, the_long_way
from torch import Tensor, nn
from torch.fx import GraphModule, Interpreter, Tracer, Transformer
from torch.nn.modules.module import (
    register_module_forward_hook,
    register_module_forward_pre_hook,
    register_module_full_backward_hook,
)
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from fxopt_capture import capture, load, save, symbolic_trace
from fxopt_capture.direct_plan import PATIENCE
from fxopt_capture.guards import GUARDS
from fxopt_core.copying import faithful_copy
from fxopt_core.errors import CaptureError

LAYERS = 3


def mlp() -> nn.Module:
    """Return linear layers and activations, some layers down in the tree."""
    torch.manual_seed(0)
    inner = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4), nn.ReLU()) for _ in range(LAYERS)))
    return nn.Sequential(OrderedDict(encoder=inner)).eval()


@pytest.fixture
def captured() -> GraphModule:
    """Return a capture whose next call goes directly."""
    graph_module = capture(mlp(), torch.randn(2, 4))
    assert goes_directly(graph_module, X)
    return graph_module


X = torch.randn(5, 4)


class TestCost:
    def test_python_functions_of_a_call(self, captured: GraphModule) -> None:
        """Seven frames of its own: four of torch's up to the call, the arguments, the hooks and the operators."""
        layers = [module for module in captured.modules() if isinstance(module, nn.Linear)]
        inner = sum(len(functions_called(lambda layer=layer: layer(X))) + 1 for layer in layers)  # type: ignore[misc]
        with torch.no_grad():
            calls = functions_called(lambda: captured(X))
        assert len(calls) <= inner + 8

    def test_no_more_than_a_trace(self, captured: GraphModule) -> None:
        traced = torch.fx.symbolic_trace(mlp())
        assert len(functions_called(lambda: captured(X))) < len(functions_called(lambda: traced(X)))

    def test_checks_cost_no_functions(self) -> None:
        class Many(nn.Module):
            def forward(self, **inputs: Tensor) -> list[Tensor]:
                return [value + 1 for value in inputs.values()]

        found = []
        for count in (1, 9):
            inputs = {f"x{index}": torch.randn(3, 4 + index) for index in range(count)}
            graph_module = capture(Many(), kwargs=inputs)
            assert goes_directly(graph_module, **inputs)
            found.append(len(functions_called(lambda: graph_module(**inputs))))  # noqa: B023
        assert found[0] == found[1]

    def test_a_way_that_is_never_right_is_looked_at_once(self) -> None:
        captured = capture(mlp(), torch.randn(2, 4))
        for _ in range(12):
            with pytest.raises(CaptureError):
                captured(X, X)
        guards: Any = captured.get_submodule(GUARDS)
        assert guards.plan.ways == {2: None}

    def test_a_few_calls_compile_nothing(self) -> None:
        captured = capture(mlp(), torch.randn(2, 4))
        for _ in range(PATIENCE):
            captured(X)
        guards: Any = captured.get_submodule(GUARDS)
        assert not guards.plan.ways
        captured(X)
        assert guards.plan.ways.keys() == {1}

    def test_the_number_of_ways_is_limited(self) -> None:
        class Many(nn.Module):
            def forward(self, a: Tensor, b: Tensor, c: Tensor, d: Tensor, e: Tensor) -> Tensor:
                return a + b + c + d + e

        captured = capture(Many(), tuple(torch.randn(2) for _ in range(5)))
        inputs = {name: torch.randn(3) for name in "abcde"}
        generator = torch.Generator().manual_seed(0)
        for _ in range(250):
            names = [list(inputs)[index] for index in torch.randperm(5, generator=generator)]
            given = {name: inputs[name] for name in names}
            assert torch.equal(captured(**given), Many()(**inputs))
        guards: Any = captured.get_submodule(GUARDS)
        assert len(guards.plan.ways) == 64


class TestWatching:
    """Whatever looks on sees what it would see of any graph module."""

    @pytest.mark.filterwarnings("ignore:Full backward hook is firing")  # hooks see arguments by position, not by name
    def test_hooks_of_the_module(self, captured: GraphModule) -> None:
        seen: list[str] = []
        with (
            captured.register_forward_hook(lambda *_: seen.append("after")),
            captured.register_forward_pre_hook(lambda *_: seen.append("before")),
            captured.register_full_backward_hook(lambda *_: seen.append("back")),
        ):
            captured(X.clone().requires_grad_()).sum().backward()
        assert seen == ["before", "after", "back"]
        assert goes_directly(captured, X)

    @pytest.mark.parametrize("register", [register_module_forward_pre_hook, register_module_forward_hook])
    def test_hooks_of_all_modules(self, captured: GraphModule, register: Callable[[Any], RemovableHandle]) -> None:
        seen: list[nn.Module] = []
        with register(lambda module, *values: seen.append(module)):
            captured(X)
        assert captured in seen and captured.get_submodule(GUARDS) in seen
        assert goes_directly(captured, X)

    @pytest.mark.filterwarnings("ignore:Full backward hook is firing")
    @pytest.mark.filterwarnings("ignore:For backward hooks to be called")  # the guards return nothing
    def test_backward_hooks_of_all_modules(self, captured: GraphModule) -> None:
        seen: list[nn.Module] = []
        with register_module_full_backward_hook(lambda module, *gradients: seen.append(module)):
            captured(X.clone().requires_grad_()).sum().backward()
        assert captured in seen

    def test_hooks_of_submodules(self, captured: GraphModule) -> None:
        seen: list[nn.Module] = []
        for module in captured.modules():
            if module is not captured:
                module.register_forward_hook(lambda module, args, output: seen.append(module))
        captured(X)
        assert [type(module) for module in seen] == [type(captured.get_submodule(GUARDS)), *[nn.Linear] * LAYERS]

    def test_function_modes_see_the_operators(self, captured: GraphModule) -> None:
        class Noting(TorchFunctionMode):
            def __init__(self) -> None:
                super().__init__()
                self.seen: list[object] = []

            def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.seen.append(func)
                return func(*args, **(kwargs or {}))

        found = []
        for graph_module in (captured, the_long_way(captured)):
            with Noting() as mode:
                graph_module(X)
            found.append([func for func in mode.seen if "aten" in str(func) or "linear" in str(func)])
        assert found[0] == found[1] and len(found[0]) == 2 * LAYERS

    def test_dispatch_modes_see_the_operators(self, captured: GraphModule) -> None:
        class Noting(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves it untyped
            def __init__(self) -> None:
                super().__init__()  # type: ignore[no-untyped-call]
                self.seen: list[object] = []

            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                self.seen.append(func)
                return func(*args, **(kwargs or {}))

        found = []
        for graph_module in (captured, the_long_way(captured)):
            with Noting() as mode:
                graph_module(X)
            found.append(mode.seen)
        assert found[0] == found[1]

    def test_interpreters_walk_the_graph(self, captured: GraphModule) -> None:
        assert torch.equal(Interpreter(captured).run(X), captured(X))
        assert torch.equal(Transformer(captured).transform()(X), captured(X))
        with pytest.raises(CaptureError):
            Interpreter(captured).run(X[:, :3])

    def test_a_trace_of_a_module_around_it_has_its_call(self, captured: GraphModule) -> None:
        class Leaves(Tracer):
            def is_leaf_module(self, module: nn.Module, name: str) -> bool:
                return module is captured

        graph = Leaves().trace(nn.Sequential(captured))
        assert [node.op for node in graph.nodes] == ["placeholder", "call_module", "output"]

    @pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning", "ignore::torch.jit.TracerWarning")
    def test_jit_traces_and_function_transforms(self, captured: GraphModule) -> None:
        trace: Any = torch.jit.trace
        assert torch.equal(trace(captured, X)(X), captured(X))
        stacked = torch.randn(2, 5, 4)
        torch.testing.assert_close(torch.func.vmap(captured)(stacked), torch.stack([captured(x) for x in stacked]))
        zeros = {name: torch.zeros_like(value) for name, value in captured.named_parameters()}
        assert not torch.func.functional_call(captured, zeros, (X,)).any()

    def test_torch_compile(self, captured: GraphModule) -> None:
        compiled = torch.compile(captured, backend="eager", fullgraph=True)
        assert torch.equal(compiled(X), captured(X))
        with pytest.raises(CaptureError, match="has size 3 in dimension 1"):
            torch.compile(captured, backend="eager")(X[:, :3])
        assert goes_directly(captured, X)

    def test_torch_export(self, captured: GraphModule) -> None:
        program = torch.export.export(captured, (X,))
        assert torch.equal(program.module()(X), captured(X))


class TestChanges:
    """What changes a module counts at the next call."""

    def test_replaced_layers(self, captured: GraphModule) -> None:
        captured.set_submodule("encoder.2.0", nn.Linear(4, 2, bias=False))
        assert captured(X).shape == (5, 2)
        inner = captured.get_submodule("encoder")
        captured.encoder = nn.Sequential(*(nn.Sequential(nn.Identity()) for _ in range(LAYERS)))
        assert torch.equal(captured(X), X.relu())
        captured.encoder = inner
        assert captured(X).shape == (5, 2)

    def test_a_wrapper_that_hands_attributes_on(self, captured: GraphModule) -> None:
        class Wrapper(nn.Module):
            def __init__(self, inner: nn.Module) -> None:
                super().__init__()
                self.inner = inner

            def __getattr__(self, name: str) -> Any:
                return getattr(super().__getattr__("inner"), name) if name != "inner" else super().__getattr__(name)

        expected, inner = captured(X), captured.get_submodule("encoder")
        captured.encoder = Wrapper(inner)
        for _ in range(3):
            assert torch.equal(captured(X), expected)
        del captured.encoder
        with pytest.raises(AttributeError, match="encoder"):
            captured(X)

    def test_weights(self, captured: GraphModule) -> None:
        layer: Any = captured.get_submodule("encoder.2.0")
        with torch.no_grad():
            layer.bias.fill_(7)
            layer.weight = nn.Parameter(torch.zeros(4, 4))
        assert torch.equal(captured(X), torch.full((5, 4), 7.0))

    def test_the_graph_counts_once_it_is_compiled(self, captured: GraphModule) -> None:
        expected = captured(X)
        for node in captured.graph.nodes:
            if node.target is torch.ops.aten.relu.default:
                node.target = operator.neg
        assert torch.equal(captured(X), expected)
        captured.recompile()
        assert not torch.equal(captured(X), expected)
        assert goes_directly(captured, X)

    def test_a_graph_that_was_edited_before_the_first_call(self) -> None:
        graph_module = capture(mlp(), torch.randn(2, 4))
        expected = the_long_way(graph_module)(X)
        for node in graph_module.graph.nodes:
            if node.target is torch.ops.aten.relu.default:
                node.target = operator.neg
        assert goes_directly(graph_module, X) and torch.equal(graph_module(X), expected)

    def test_a_forward_of_the_instance_and_one_that_wraps_the_class(self, captured: GraphModule) -> None:
        captured.forward = lambda input: input * 0
        assert not captured(X).any()
        del captured.forward
        assert goes_directly(captured, X)
        before = type(captured).forward
        type(captured).forward = lambda self, input: -before(self, input)
        expected = -Interpreter(captured).run(X)
        assert all(torch.equal(captured(X), expected) for _ in range(PATIENCE + 3))

    def test_modes(self, captured: GraphModule) -> None:
        captured.train()
        assert goes_directly(captured, X)
        dropping = capture(nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).eval(), torch.randn(2, 4))
        assert goes_directly(dropping, X)
        with pytest.raises(CaptureError, match="evaluation mode"):
            dropping.train()
        assert goes_directly(dropping, X)


COPIES: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "faithful": faithful_copy,
    "pickle": lambda graph_module: pickle.loads(pickle.dumps(graph_module)),
}


@pytest.mark.parametrize("kind", COPIES)
def test_copies(captured: GraphModule, kind: str) -> None:
    twin = COPIES[kind](captured)
    expected = captured(X)
    for _ in range(4):
        assert torch.equal(twin(X), expected) and torch.equal(captured(X), expected)
    assert goes_directly(twin, X) and goes_directly(captured, X)
    assert torch.equal(twin(X), expected)
    if kind != "copy":
        with torch.no_grad():
            twin.get_parameter("encoder.2.0.bias").fill_(100)
        assert torch.equal(captured(X), expected) and not torch.equal(twin(X), expected)
    with pytest.raises(CaptureError, match="has size 3 in dimension 1"):
        twin(X[:, :3])


@pytest.mark.parametrize("traced", [False, True])
def test_loaded_modules(tmp_path: Path, traced: bool) -> None:
    model = mlp()
    graph_module = torch.fx.symbolic_trace(model) if traced else capture(model, torch.randn(2, 4))
    save(graph_module, tmp_path / "model.pt2", (torch.randn(2, 4),))
    loaded = load(tmp_path / "model.pt2")
    assert goes_directly(loaded, X) and torch.equal(loaded(X), model(X))
    with pytest.raises(CaptureError, match="dimension 1"):
        loaded(X[:, :3])
    assert goes_directly(faithful_copy(loaded), X)


def test_modules_of_symbolic_trace() -> None:
    traced = symbolic_trace(mlp(), example_inputs={"input": torch.randn(2, 4)})
    assert goes_directly(traced, X)


def test_errors_within_name_the_same_line(captured: GraphModule, capsys: pytest.CaptureFixture[str]) -> None:
    captured.set_submodule("encoder.1.0", nn.Linear(9, 9))
    first = outcome(captured, (X,), {})
    printed = capsys.readouterr().err
    assert isinstance(first, tuple) and first == outcome(the_long_way(captured), (X,), {})
    assert capsys.readouterr().err.splitlines()[-6:] == printed.splitlines()[-6:]


def test_gradients_and_changes_in_place() -> None:
    class Adds(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return y.add_(x) * x

    captured = capture(Adds(), (torch.randn(2, 3), torch.randn(2, 3)))
    assert goes_directly(captured, torch.ones(2, 3), torch.ones(2, 3))
    x, y = torch.full((4, 3), 2.0, requires_grad=True), torch.ones(4, 3)
    captured(x, y).sum().backward()
    assert torch.equal(y.detach(), torch.full((4, 3), 3.0))
    assert x.grad is not None and torch.equal(x.grad, torch.full((4, 3), 5.0))
