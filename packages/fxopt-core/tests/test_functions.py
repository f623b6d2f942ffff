"""Torch passes and plain functions as transformations."""

from __future__ import annotations

import copy
import functools
import operator
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.fx import Graph, GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.dialect.common.cse_pass import CSEPass
from torch.fx.passes.infra.pass_base import PassBase, PassResult

from fxopt_core import (
    LintAndRecompile,
    NotReversibleError,
    PassError,
    PassOptionError,
    PostconditionError,
    Registry,
    Transformation,
    compose,
    history,
    hookimpl,
    iter_nodes,
)
from fxopt_core.passes.functions import from_function, from_torch_pass

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # torch warns of torch
    from torch.fx.experimental.optimization import fuse


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.norm(self.convolution(x))) * 2


def traced() -> GraphModule:
    return torch.fx.symbolic_trace(Model().eval())


def swap_mul(graph_module: GraphModule, *, target: str = "add") -> None:
    """Change every product."""
    for node in iter_nodes(graph_module.graph):
        if node.target is operator.mul:
            node.target = getattr(operator, target)


def count(graph_module: GraphModule) -> Any:
    return len(graph_module.graph.nodes)


def result_of_nothing(graph_module: GraphModule) -> PassResult:
    return PassResult(None, True)  # type: ignore[arg-type]  # that is the test


def break_half_way(graph_module: GraphModule) -> None:
    swap_mul(graph_module)
    graph_module.graph.erase_node(graph_module.graph.output_node())
    raise ValueError("half done")


def leave_it_broken(graph_module: GraphModule) -> None:
    for node in iter_nodes(graph_module.graph):
        if node.target is operator.mul:
            node.graph.output_node().append(node)


def replace_module(graph_module: GraphModule) -> None:
    graph_module.norm = nn.Identity()


def make_float(graph_module: GraphModule) -> None:
    for node in iter_nodes(graph_module.graph):
        if node.target is operator.mul:
            node.args = (node.args[0], 2.0)


class SwapPass(PassBase):
    """A pass as torch's users write it, with state."""

    def __init__(self, target: str = "add") -> None:
        self.target, self.calls = target, 0

    def call(self, graph_module: GraphModule) -> PassResult:
        self.calls += 1
        swap_mul(graph_module, target=self.target)
        return PassResult(graph_module, False)  # it does not know itself


def replace_weight(graph_module: GraphModule, *, path: str = "convolution.weight") -> None:
    owner, _, name = path.rpartition(".")
    weight = graph_module.get_parameter(path)
    graph_module.get_submodule(owner).register_parameter(name, nn.Parameter(weight.detach() * 2))


def reading_a_parameter() -> GraphModule:
    class Reads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.other = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.weight + self.other

    return torch.fx.symbolic_trace(Reads())


class Requires(SwapPass):
    def requires(self, graph_module: GraphModule) -> None:
        raise ValueError("no such graph")


def sites(graph_module: GraphModule) -> list[str]:
    return [rewrite.site for rewrite in history(graph_module)[-1].rewrites]


class TestFromTorchPass:
    @pytest.mark.parametrize(
        ("made", "name"),
        [
            (lambda: from_torch_pass(swap_mul, target="sub"), "swap-mul"),
            (lambda: from_torch_pass(SwapPass("sub")), "swap-pass"),
            (lambda: from_torch_pass(SwapPass, target="sub"), "swap-pass"),
        ],
    )
    def test_every_kind(self, made: Callable[[], Transformation], name: str) -> None:
        transformation, graph_module = made(), traced()
        assert transformation.name == name
        assert transformation(graph_module) is graph_module
        assert operator.sub in {node.target for node in iter_nodes(graph_module.graph)}
        record = history(graph_module)[-1]
        assert (record.pass_name, record.changed, record.signature) == (name, True, transformation.signature)
        assert sites(graph_module) == ["mul"]
        assert [node.name for node in made().get_transformed_nodes(graph_module)] == ["mul"]

    def test_equality_and_signature(self) -> None:
        passes = [
            from_torch_pass(swap_mul),
            from_torch_pass(swap_mul, target="sub"),
            from_torch_pass(count),
            from_torch_pass(SwapPass()),
            from_torch_pass(SwapPass("sub")),
            from_torch_pass(SwapPass),
        ]
        assert len({each.signature for each in passes}) == len(set(passes)) == len(passes)
        assert from_torch_pass(SwapPass("sub")) == from_torch_pass(SwapPass("sub"))
        assert len({each.uuid() for each in passes}) == len(passes)

    def test_what_an_object_counts_while_it_runs_counts_for_nothing(self) -> None:
        transformation = from_torch_pass(SwapPass())
        before = transformation.signature
        transformation(traced())
        assert transformation.signature == before

    def test_the_signature_is_that_of_every_process(self) -> None:
        script = (
            "from torch.fx.passes.dialect.common.cse_pass import CSEPass\n"
            "from torch.fx.experimental.optimization import fuse\n"
            "from fxopt_core.passes.functions import from_torch_pass\n"
            "print(from_torch_pass(CSEPass()).signature, from_torch_pass(fuse, inplace=True).signature)"
        )
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
        here = [from_torch_pass(CSEPass()).signature, from_torch_pass(fuse, inplace=True).signature]
        assert run.stdout.split() == here

    def test_copies_and_pickles(self) -> None:
        for transformation in (from_torch_pass(swap_mul, target="sub"), from_torch_pass(SwapPass("sub"))):
            for copied in (copy.deepcopy(transformation), pickle.loads(pickle.dumps(transformation))):
                assert copied == transformation
                assert operator.sub in {node.target for node in iter_nodes(copied(traced()).graph)}

    def test_options_are_shown(self) -> None:
        transformation = from_torch_pass(swap_mul, target="sub", preserves_computation=True)
        assert dict(transformation.options) == {"target": "sub"}
        assert repr(transformation) == "from_torch_pass(swap_mul, target='sub')"
        assert repr(from_torch_pass(SwapPass())) == "from_torch_pass(SwapPass())"
        assert transformation.preserves_computation
        assert not from_torch_pass(swap_mul).preserves_computation
        graph_module = transformation(traced())
        assert history(graph_module)[-1].options == (("target", "sub"),)

    def test_applied_twice_it_marks_nothing_more(self) -> None:
        graph_module, transformation = traced(), from_torch_pass(swap_mul)
        transformation(graph_module)
        transformation(graph_module)
        assert (history(graph_module)[-1].changed, sites(graph_module)) == (False, [])
        assert len(transformation.get_transformed_nodes(graph_module)) == 1

    @pytest.mark.parametrize("function", [break_half_way, leave_it_broken])
    def test_an_error_leaves_nothing_half_done(self, function: Callable[[GraphModule], None]) -> None:
        graph_module = traced()
        code = graph_module.code
        with pytest.raises(PassError, match=function.__name__.replace("_", "-")):
            from_torch_pass(function)(graph_module)
        graph_module.recompile()
        assert graph_module.code == code
        assert len(history(graph_module)) == 0

    def test_in_a_composition_it_is_rolled_back_with_the_rest(self) -> None:
        graph_module = traced()
        code = graph_module.code
        with pytest.raises(PassError, match=r"pass 1 of the composition after `swap-mul`"):
            compose(from_torch_pass(swap_mul), from_torch_pass(break_half_way))(graph_module)
        graph_module.recompile()
        assert graph_module.code == code

    def test_what_a_torch_pass_requires(self) -> None:
        with pytest.raises(PassError, match="no such graph"):
            from_torch_pass(Requires())(traced())

    def test_it_cannot_be_reversed(self) -> None:
        graph_module = from_torch_pass(swap_mul)(traced())
        with pytest.raises(NotReversibleError):
            from_torch_pass(swap_mul)(graph_module, reverse=True)  # type: ignore[arg-type]  # that is the point

    @pytest.mark.parametrize("function", [count, result_of_nothing])
    def test_a_result_that_is_no_graph_module(self, function: Callable[[GraphModule], object]) -> None:
        with pytest.raises(PostconditionError, match="expected a PassResult, a graph module, or None"):
            from_torch_pass(function)(traced())

    def test_passes_of_torch(self) -> None:
        graph_module = make_fx(lambda x: torch.sin(x) + torch.sin(x))(torch.ones(2))
        result = from_torch_pass(CSEPass(), preserves_computation=True)(graph_module)
        assert len(result.graph.find_nodes(op="call_function", target=torch.ops.aten.sin.default)) == 1
        assert sites(result) == ["add"]

    def test_a_pass_of_torch_that_returns_a_copy(self) -> None:
        graph_module = LintAndRecompile()(traced())
        result = from_torch_pass(fuse)(graph_module)
        x = torch.randn(1, 2, 3, 3)
        assert result is not graph_module
        torch.testing.assert_close(result(x), graph_module(x))
        assert [record.pass_name for record in history(result)] == ["lint-and-recompile", "fuse"]
        assert sites(result) == ["convolution", "relu"]

    def test_a_pass_of_inductor(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._inductor.custom_graph_pass import CustomGraphPass

        class SwapGraph(CustomGraphPass):
            __qualname__ = "SwapGraph"  # importing inductor takes too long for the top of this module

            def __call__(self, graph: Graph) -> None:
                for node in iter_nodes(graph):
                    if node.target is operator.mul:
                        node.target = operator.add

            def uuid(self) -> str:
                return "swap"

        monkeypatch.setattr(sys.modules[__name__], "SwapGraph", SwapGraph, raising=False)
        assert sites(from_torch_pass(SwapGraph())(traced())) == ["mul"]

    def test_a_module_put_in_place_of_another(self) -> None:
        assert sites(from_torch_pass(replace_module)(traced())) == ["norm"]

    def test_a_parameter_put_in_place_of_another(self) -> None:
        assert sites(from_torch_pass(replace_weight)(traced())) == ["convolution"]
        graph_module = reading_a_parameter()
        assert sites(from_torch_pass(replace_weight, path="weight")(graph_module)) == ["weight"]

    def test_types_of_constants_count(self) -> None:
        assert sites(from_torch_pass(make_float)(traced())) == ["mul"]


class TestWhatCannotBeWrapped:
    @pytest.mark.parametrize(
        ("wrong", "message"),
        [
            (lambda graph_module: None, "cannot be imported by name"),
            (functools.partial(swap_mul), "a partial"),
            (SwapPass(object()), "found an object of type builtins:object"),  # type: ignore[arg-type]  # the test
            (3, "an int, expected a PassBase"),
            (nn.ReLU(), "a ReLU, expected a PassBase"),
            (LintAndRecompile(), "a LintAndRecompile, expected"),
            (LintAndRecompile, r"a transformation already: write LintAndRecompile\(\)"),
            (lambda: None, "cannot call <lambda>: too many positional"),
        ],
    )
    def test_it_is_a_type_error(self, wrong: Any, message: str) -> None:
        with pytest.raises(TypeError, match=message):
            from_torch_pass(wrong)

    def test_a_function_inside_of_another(self) -> None:
        def inside(graph_module: GraphModule) -> None: ...

        with pytest.raises(TypeError, match=r"inside'.*define it with `def`"):
            from_torch_pass(inside)

    @pytest.mark.parametrize("wrapped", [swap_mul, SwapPass, SwapPass(), CSEPass()])
    def test_options_that_are_not_taken(self, wrapped: Any) -> None:
        with pytest.raises(TypeError, match="unexpected keyword argument 'tarte'"):
            from_torch_pass(wrapped, tarte="sub")

    def test_an_option_without_a_stable_value(self) -> None:
        with pytest.raises(TypeError, match="no value that is the same in every process"):
            from_torch_pass(swap_mul, target=object())


@from_function(preserves_computation=True)
def halve_products(graph_module: GraphModule, *, times: int = 1, where: tuple[str, ...] = ()) -> None:
    """``x * 2`` -> ``x + x``.

    And more about it.
    """
    for node in iter_nodes(graph_module.graph):
        if node.target is operator.mul and node.args[1] == 2 and not (where and node.name not in where):
            node.target, node.args = operator.add, (node.args[0], node.args[0])


@from_function
def as_it_is(graph_module: GraphModule) -> GraphModule:
    """graph module -> the same one."""
    return graph_module


class Plugin:
    @hookimpl
    def fxopt_transformations(self) -> list[type[Transformation]]:
        return [halve_products, as_it_is]


class TestFromFunction:
    def test_it_is_a_class_of_passes(self) -> None:
        graph_module = halve_products()(traced(), expect=1)
        assert sites(graph_module) == ["mul"]
        assert issubclass(halve_products, Transformation)
        assert halve_products.preserves_computation
        assert not as_it_is.preserves_computation
        assert halve_products.__doc__.startswith("``x * 2``")  # type: ignore[union-attr]  # it has one

    def test_options(self) -> None:
        assert dict(halve_products(times=3).options) == {"times": 3, "where": ()}
        assert halve_products(times=3) == halve_products(times=3) != halve_products()
        assert repr(halve_products(where=("a",))) == "halve_products(times=1, where=('a',))"
        with pytest.raises(PassOptionError, match=r"'tims'.*its options: times, where"):
            halve_products(tims=3)
        with pytest.raises(TypeError):
            halve_products(3)  # type: ignore[call-arg]  # options are keywords

    def test_options_reach_the_function(self) -> None:
        assert sites(halve_products(where=("other",))(traced())) == []

    def test_in_a_registry(self) -> None:
        passes = Registry([])
        passes.register(Plugin())
        info = passes.available()["halve-products"]
        assert info.summary == "``x * 2`` -> ``x + x``."
        assert [(o.name, o.annotation, o.default) for o in info.options.values()] == [
            ("times", int, 1),
            ("where", tuple[str, ...], ()),
        ]
        text = 'halve-products{times=2 where=("a",)},as-it-is'
        assert passes.pipeline_text(passes.pipeline(text)) == text
        with pytest.raises(PassOptionError, match="expected int"):
            passes.create("halve-products", times="2")

    def test_copies_and_pickles(self) -> None:
        given = halve_products(times=2)
        for made in (copy.deepcopy(given), pickle.loads(pickle.dumps(given))):
            assert made == halve_products(times=2)
            assert made.uuid() == halve_products(times=2).uuid() != halve_products().uuid()

    def test_the_code_enters_the_key_and_not_the_signature(self) -> None:
        def make(code: int) -> type[Transformation]:
            if code:

                @from_function
                def local(graph_module: GraphModule) -> None:
                    """One."""
            else:

                @from_function
                def local(graph_module: GraphModule) -> None:
                    """Another."""

            return local

        assert make(0)().signature == make(1)().signature
        assert make(0)().uuid() != make(1)().uuid()

    def test_it_is_rolled_back(self) -> None:
        graph_module = traced()
        code = graph_module.code
        with pytest.raises(PassError, match="half done"):
            from_function(break_half_way)()(graph_module)
        graph_module.recompile()
        assert graph_module.code == code


def takes_nothing() -> None: ...
def takes_keywords_alone(*, graph_module: GraphModule) -> None: ...
def takes_a_position(graph_module: GraphModule, times: int = 1) -> None: ...
def takes_any(graph_module: GraphModule, **options: object) -> None: ...
def demands(graph_module: GraphModule, *, times: int) -> None: ...


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda graph_module: None, "a lambda, expected a function"),
        (SwapPass(), "a SwapPass, expected a function"),
        (SwapPass, "an ABCMeta, expected a function"),
        (takes_nothing, "takes_nothing takes no graph module"),
        (takes_keywords_alone, "takes no graph module"),
        (takes_a_position, "the parameters times, expected options"),
        (takes_any, "the parameters options, expected options"),
        (demands, "the parameters times, expected options"),
    ],
)
def test_functions_that_are_no_passes(wrong: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        from_function(wrong)


def test_the_cost_is_linear(steps_of: Callable[[Callable[[], object]], int]) -> None:
    """Hubs included: one node with all others as users."""

    def chain(length: int) -> GraphModule:
        graph = Graph()
        hub = graph.placeholder("x")
        value = hub
        for _ in range(length):
            value = graph.call_function(operator.mul, (value, hub))
        graph.output(value)
        return GraphModule(nn.Module(), graph)

    small, large = (steps_of(functools.partial(from_torch_pass(swap_mul).transform, chain(n))) for n in (50, 200))
    assert large < 5 * small
