from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from site_passes import exported
from torch import Tensor, nn
from torch.fx import GraphModule, Node, symbolic_trace
from torch.nn.utils import parametrizations, prune

from fxopt_core import iter_nodes
from fxopt_rewrite import (
    REASONS,
    BatchNormCall,
    ConvolutionCall,
    GraphIndex,
    LinearCall,
    Obstacle,
    bare_module,
    input_of,
    read_batch_norm,
    read_convolution,
    read_linear,
)

Reader = Callable[[GraphIndex, Node], Any]


def views_of(graph_module: GraphModule, reader: Reader) -> list[Any]:
    """Return what a reader makes of the nodes of a graph, but for the nodes that it leaves alone."""
    index = GraphIndex(graph_module)
    found = [reader(index, node) for node in iter_nodes(graph_module.graph)]
    return [view for view in found if view is not None]


def view_of(model: nn.Module, reader: Reader) -> Any:
    (view,) = views_of(symbolic_trace(model), reader)
    return view


class Calls(nn.Module):
    """Holds one layer and calls it in any way."""

    def __init__(self, layer: nn.Module, call: Callable[[Any, Tensor], object] = lambda layer, x: layer(x)) -> None:
        super().__init__()
        self.layer = layer
        self.call = call

    def forward(self, x: Tensor) -> object:
        return self.call(self.layer, x)


def with_layer_as_leaf(model: Calls) -> GraphModule:
    class Leaves(torch.fx.Tracer):
        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return module_qualified_name == "layer"

    return GraphModule(model, Leaves().trace(model))


FORMS: dict[str, Callable[[nn.Linear, Tensor], Tensor]] = {
    "module": lambda layer, x: layer(x),
    "function": lambda layer, x: F.linear(x, layer.weight, layer.bias),
    "operator": lambda layer, x: torch.ops.aten.linear.default(x, layer.weight, layer.bias),
}


class TestLinear:
    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("training", [True, False])
    def test_every_form(self, form: str, training: bool) -> None:
        layer = nn.Linear(3, 5)
        graph_module = symbolic_trace(Calls(layer, FORMS[form]).train(training))
        (call,) = views_of(graph_module, read_linear)
        assert isinstance(call, LinearCall)
        assert (call.input.name, call.weight.name, call.module_name) == ("x", "layer.weight", "layer")
        assert call.bias is not None
        assert (call.bias.name, call.bias.key) == ("layer.bias", "bias")
        assert call.weight.tensor is layer.weight
        assert (call.in_features, call.out_features, call.label) == (3, 5, "layer")
        assert (call.module is None) == (not form.startswith("module"))
        assert (call.weight.node is None) == form.startswith("module")
        if form != "operator":
            assert call.training is training
        assert input_of(call.node) is call.input

    @pytest.mark.parametrize("form", ["module", "function"])
    def test_without_bias(self, form: str) -> None:
        call = view_of(Calls(nn.Linear(3, 5, bias=False), FORMS[form]), read_linear)
        assert call.bias is None
        assert [ref.key for ref in call.tensors] == ["weight"]

    @pytest.mark.parametrize("training", [True, False])
    def test_of_an_export(self, training: bool) -> None:
        model = nn.Sequential(nn.Linear(3, 5), nn.Dropout()).train(training)
        (call,) = views_of(exported(model, torch.randn(2, 3)), read_linear)
        assert (call.weight.name, call.bias.name, call.module, call.training) == ("0.weight", "0.bias", None, training)

    def test_at_the_root(self) -> None:
        call = view_of(nn.Linear(3, 5), read_linear)
        assert (call.weight.name, call.module_name, call.label) == ("weight", "", "linear")

    def test_other_nodes_are_left_alone(self) -> None:
        bilinear = Calls(nn.Bilinear(3, 3, 5), lambda layer, x: layer(x, x))
        for model in (nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Flatten()), bilinear):
            assert views_of(symbolic_trace(model), read_linear) == []


class Adapter(nn.Linear):
    pass


def as_buffer(layer: nn.Linear) -> None:
    del layer.weight
    layer.register_buffer("weight", torch.ones(3, 3))


class Wrapped(nn.Parameter):
    pass


def quantized(layer: nn.Linear) -> nn.Module:
    """Return a module of the name that torch gives to quantized ones, which are no subclasses."""
    kind: type[nn.Module] = type("Linear", (nn.Module,), {"__module__": "torch.ao.nn.quantized.modules.linear"})
    return kind()


def with_extra(name: str, value: object) -> Callable[[Any], None]:
    return lambda layer: setattr(layer, name, value)


def with_weight(weight: Tensor) -> Callable[[Any], None]:
    return with_extra("weight", weight)


# What is done to a layer, or makes another one of it; the reason, and what the sentence says.
OBSTACLES: list[tuple[Callable[[Any], object], str, str]] = [
    (lambda layer: Adapter(3, 3), "subclass", "is an Adapter, a subclass of torch's own Linear"),
    (lambda layer: layer.register_forward_hook(print), "hooks", "_forward_hooks"),
    (lambda layer: layer.register_forward_pre_hook(print), "hooks", "_forward_pre_hooks"),
    (lambda layer: layer.register_full_backward_hook(print), "hooks", "_backward_hooks"),
    (lambda layer: layer.register_state_dict_pre_hook(print), "hooks", "_state_dict_pre_hooks"),
    (lambda layer: prune.l1_unstructured(layer, "weight", 1), "hooks", "_forward_pre_hooks"),  # type: ignore[no-untyped-call]  # torch's
    (parametrizations.weight_norm, "parametrized", "is parametrized"),
    (parametrizations.spectral_norm, "parametrized", "is parametrized"),
    (with_extra("forward", torch.relu), "patched-forward", "has a forward of its own on the instance"),
    (with_extra("adapter", nn.Linear(3, 3)), "extra-state", "holds `adapter`, which its class does not have"),
    (with_extra("config", {"a": 1}), "extra-state", "an attribute `config` of type dict"),
    (with_extra("items", [torch.ones(1)]), "extra-state", "an attribute `items` of type list"),
    (lambda layer: nn.LazyLinear(3), "lazy", "is lazy (LazyLinear) and has no weights yet"),
    (as_buffer, "not-a-parameter", "has a `weight` that is not a parameter"),
    (
        with_weight(Wrapped(torch.ones(3, 3))),
        "not-a-parameter",
        "has a `weight` that is a Wrapped, not a plain torch.nn.Parameter",
    ),
    (
        with_weight(nn.Parameter(torch.eye(3).to_sparse())),
        "not-a-parameter",
        "has a `weight` that is sparse or quantized",
    ),
    (lambda layer: layer.weight.register_hook(print), "hooks", "has a `weight` that has hooks on its gradient"),
    (
        lambda layer: layer.weight.register_post_accumulate_grad_hook(print),
        "hooks",
        "has a `weight` that has hooks on its gradient",
    ),
    (with_extra("weight", None), "not-a-parameter", "has no weight"),
    (quantized, "not-a-parameter", "is quantized (torch.ao.nn.quantized.modules.linear)"),
]


class TestObstaclesOfModules:
    @pytest.mark.filterwarnings("ignore:Lazy modules:UserWarning")
    @pytest.mark.parametrize(("change", "reason", "found"), OBSTACLES, ids=[f"{o[1]} {o[2][:20]}" for o in OBSTACLES])
    def test_reason_and_sentence(self, change: Callable[[Any], object], reason: str, found: str) -> None:
        layer = nn.Linear(3, 3)
        made = change(layer)
        (view,) = views_of(with_layer_as_leaf(Calls(made if isinstance(made, nn.Module) else layer)), read_linear)
        assert isinstance(view, Obstacle)
        assert (view.site, view.reason) == ("layer", reason)
        assert view.message.startswith("module `layer` ")
        assert found in view.message
        assert reason in REASONS

    @pytest.mark.parametrize(
        "harmless", [("_is_hf_initialized", True), ("sizes", [1, 2]), ("note", ("a", None, torch.float32))]
    )
    def test_plain_data_is_none(self, harmless: tuple[str, object]) -> None:
        layer = nn.Linear(3, 3)
        with_extra(*harmless)(layer)
        assert isinstance(view_of(Calls(layer), read_linear), LinearCall)

    def test_removed_hooks_are_none(self) -> None:
        layer = nn.Linear(3, 3)
        layer.register_forward_hook(lambda *_: None).remove()
        layer.weight.register_hook(lambda grad: grad).remove()  # type: ignore[no-untyped-call]  # torch's
        assert isinstance(view_of(Calls(layer), read_linear), LinearCall)


class Functional(nn.Module):
    def __init__(self, call: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, 3))
        self.register_buffer("fixed", torch.ones(3, 3))
        self.plain = torch.ones(3, 3)
        self.call = call

    def forward(self, x: Tensor) -> Tensor:
        return self.call(self, x)


class TestObstaclesOfFunctions:
    @pytest.mark.parametrize(
        ("call", "reason", "found"),
        [
            (lambda m, x: F.linear(x, m.weight * 2), "computed-weight", "reads a weight that `mul` computes"),
            (lambda m, x: F.linear(x, x), "computed-weight", "reads a weight that is an input, `x`"),
            (lambda m, x: F.linear(x, m.weight, x[0]), "computed-weight", "reads a bias that `getitem` computes"),
            (lambda m, x: F.linear(x, m.fixed), "not-a-parameter", "`fixed`, read by node `linear`, is a Tensor"),
            (lambda m, x: F.linear(x, m.plain), "not-a-parameter", "is a Tensor, not a plain torch.nn.Parameter"),
        ],
        ids=["computed", "input", "computed bias", "buffer", "plain attribute"],
    )
    def test_reason_and_sentence(self, call: Callable[[Any, Tensor], Tensor], reason: str, found: str) -> None:
        view = view_of(Functional(call), read_linear)
        assert isinstance(view, Obstacle)
        assert view.reason == reason
        assert found in view.message

    def test_parameter_that_is_registered_nowhere(self) -> None:
        graph_module = symbolic_trace(Functional(lambda m, x: F.linear(x, m.weight)))
        weight = graph_module.weight
        del graph_module.weight
        object.__setattr__(graph_module, "weight", weight)
        (view,) = views_of(graph_module, read_linear)
        assert (view.reason, "is a plain attribute" in view.message) == ("not-a-parameter", True)


class TestConvolution:
    @pytest.mark.parametrize("dims", [1, 2, 3])
    @pytest.mark.parametrize("transposed", [False, True])
    def test_settings_and_a_module_that_computes_it(self, dims: int, transposed: bool) -> None:
        kind = f"Conv{'Transpose' if transposed else ''}{dims}d"
        settings: dict[str, Any] = {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}
        if transposed:
            settings["output_padding"] = 1
        layer = getattr(nn, kind)(4, 6, 3, **settings).eval()
        x = torch.randn(2, 4, *[9] * dims)
        (call,) = views_of(symbolic_trace(Calls(layer)), read_convolution)
        assert isinstance(call, ConvolutionCall)
        assert (call.dims, call.in_channels, call.out_channels) == (dims, 4, 6)
        assert (call.groups, call.transposed, call.padding_mode) == (2, transposed, "zeros")
        assert (call.stride, call.padding, call.dilation) == ((2,) * dims, (1,) * dims, (2,) * dims)
        assert call.output_padding == (int(transposed),) * dims
        built = call.build(bias=True)
        assert type(built) is type(layer)
        assert built.weight.is_meta
        built.load_state_dict(layer.state_dict(), assign=True)
        assert torch.equal(built(x), layer(x))

    @pytest.mark.parametrize("padding", ["same", "valid"])
    def test_padding_by_name(self, padding: str) -> None:
        layer, x = nn.Conv2d(2, 2, 3, padding=padding), torch.randn(1, 2, 5, 5)
        (view,) = views_of(symbolic_trace(Calls(layer)), read_convolution)
        assert view.padding == padding
        built = view.build(bias=True)
        built.load_state_dict(layer.state_dict(), assign=True)
        assert torch.equal(built(x), layer(x))

    def test_padding_mode(self) -> None:
        view = view_of(Calls(nn.Conv2d(2, 2, 3, padding=1, padding_mode="reflect")), read_convolution)
        assert view.padding_mode == "reflect"
        assert view.build(bias=False).padding_mode == "reflect"

    def test_general_operator(self) -> None:
        def call(m: nn.Conv2d, x: Tensor) -> Tensor:
            return torch.convolution(x, m.weight, m.bias, [2], [1, 1], [1, 1], False, [0, 0], 1)

        view = view_of(Calls(nn.Conv2d(2, 3, 3), call), read_convolution)
        assert (view.stride, view.padding, view.transposed, view.groups) == ((2, 2), (1, 1), False, 1)

    def test_values_that_the_graph_computes(self) -> None:
        for call in (
            lambda m, x: F.conv2d(x, m.weight, stride=x.shape[0]),
            lambda m, x: F.conv2d(x, m.weight, padding=[x.shape[0], 1]),
            lambda m, x: F.conv2d(x, m.weight, groups=x.shape[0]),
        ):
            view = view_of(Calls(nn.Conv2d(2, 2, 3), call), read_convolution)
            assert isinstance(view, Obstacle)
            assert view.reason == "unsupported-call"

    def test_output_size_of_a_call(self) -> None:
        layer = nn.ConvTranspose2d(2, 2, 3)
        sized = view_of(Calls(layer, lambda m, x: m(x, output_size=[9, 9])), read_convolution)
        assert (sized.site, sized.reason) == ("layer", "unsupported-call")
        assert isinstance(view_of(Calls(layer, lambda m, x: m(x, output_size=None)), read_convolution), ConvolutionCall)


class TestBatchNorm:
    @pytest.mark.parametrize(
        ("layer", "ranks"),
        [(nn.BatchNorm1d(3), (2, 3)), (nn.BatchNorm2d(3), (4,)), (nn.BatchNorm3d(3), (5,))],
        ids=["1d", "2d", "3d"],
    )
    def test_modules(self, layer: nn.BatchNorm2d, ranks: tuple[int, ...]) -> None:
        layer.eps = 1e-2
        call = view_of(Calls(layer).eval(), read_batch_norm)
        assert isinstance(call, BatchNormCall)
        assert (call.ranks, call.eps, call.training, call.uses_batch_statistics) == (ranks, 1e-2, False, False)
        names = ["layer.weight", "layer.bias", "layer.running_mean", "layer.running_var", "layer.num_batches_tracked"]
        assert [ref.name for ref in call.tensors] == names

    def test_without_parameters_and_without_statistics(self) -> None:
        bare = view_of(Calls(nn.BatchNorm2d(3, affine=False)).eval(), read_batch_norm)
        assert (bare.weight, bare.bias, bare.uses_batch_statistics) == (None, None, False)
        stateless = view_of(Calls(nn.BatchNorm2d(3, track_running_stats=False)).eval(), read_batch_norm)
        assert (stateless.running_mean, stateless.counter, stateless.uses_batch_statistics) == (None, None, True)
        assert view_of(Calls(nn.BatchNorm2d(3)).train(), read_batch_norm).uses_batch_statistics

    @pytest.mark.parametrize("training", [True, False])
    @pytest.mark.parametrize("form", ["function", "torch", "export"])
    def test_operations(self, form: str, training: bool) -> None:
        def functional(m: Any, x: Tensor) -> Tensor:
            return F.batch_norm(x, m.running_mean, m.running_var, m.weight, m.bias, training, 0.1, 1e-2)

        def torch_level(m: Any, x: Tensor) -> Tensor:
            return torch.batch_norm(x, m.weight, m.bias, m.running_mean, m.running_var, training, 0.1, 1e-2, True)

        layer = nn.BatchNorm2d(3, eps=1e-2).train(training)
        x = torch.randn(2, 3, 4, 4)
        if form == "export":
            (call,) = views_of(exported(Calls(layer), x), read_batch_norm)
        else:
            call = view_of(Calls(layer, functional if form == "function" else torch_level), read_batch_norm)
        assert isinstance(call, BatchNormCall)
        assert (call.input.name, call.training, call.eps, call.ranks) == ("x", training, 1e-2, ())
        assert (call.module, call.module_name) == (None, "layer")
        refs = [call.weight, call.bias, call.running_mean, call.running_var, call.counter]
        counter = "num_batches_tracked" if form == "export" else None  # elsewhere, what is not read is not there
        assert [ref and ref.key for ref in refs] == ["weight", "bias", "running_mean", "running_var", counter]

    def test_obstacles(self) -> None:
        class Own(nn.BatchNorm2d):
            pass

        (view,) = views_of(with_layer_as_leaf(Calls(Own(3))), read_batch_norm)
        assert view.reason == "subclass"
        (synchronised,) = views_of(with_layer_as_leaf(Calls(nn.SyncBatchNorm(3))), read_batch_norm)
        assert isinstance(synchronised, BatchNormCall)
        assert synchronised.ranks == ()
        computed = view_of(
            Calls(nn.BatchNorm2d(3), lambda m, x: F.batch_norm(x, x.mean(), m.running_var)), read_batch_norm
        )
        assert computed.reason == "computed-weight"
        flag = view_of(
            Calls(nn.BatchNorm2d(3), lambda m, x: F.batch_norm(x, m.running_mean, m.running_var, training=x.dim() > 1)),
            read_batch_norm,
        )
        assert flag.reason == "unsupported-call"


class TestBareModules:
    def test_draw_no_values_and_are_of_the_exact_class(self) -> None:
        state = torch.get_rng_state()
        for cls, args in ((nn.Linear, (2, 3)), (nn.Conv2d, (2, 3, 3)), (nn.ConvTranspose1d, (2, 3, 3))):
            module = bare_module(cls, *args)
            assert type(module) is cls
            assert all(parameter.is_meta for parameter in module.parameters())
        assert torch.equal(torch.get_rng_state(), state)

    def test_of_other_classes_run_their_initialisation(self) -> None:
        class Bounded(nn.Linear):
            def reset_parameters(self) -> None:
                self.bound = 1.0

        assert bare_module(Bounded, 2, 3).bound == 1.0
