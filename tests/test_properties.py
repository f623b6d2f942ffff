"""What holds for every pass on every model: same results, an untouched caller, exact undo, no trace of a failure."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from fault_harness import InjectedFault, Injector
from footprints import Footprint, values_of
from generated_models import Generated, convolution_models, linear_models
from hypothesis import HealthCheck, given, settings, strategies as st
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_arith import ChangeTrueDivToMulByInverse
from fxopt_core import (
    DeepCopy,
    LintAndRecompile,
    NotReversibleError,
    PassError,
    ReversibleTransformation,
    Transformation,
    UndoError,
    compose,
    history,
    infer_shapes,
    iter_nodes,
    undo,
)
from fxopt_linear import FuseBiasInLinear, MergeLinears
from fxopt_norm import (
    FuseBatchNorm1dInConv1d,
    FuseBatchNorm1dInLinear,
    FuseBatchNorm2dInConv2d,
    FuseBatchNorm3dInConv3d,
    FuseBatchNormInConvTranspose,
)

ON_LINEAR: list[Transformation] = [
    MergeLinears(),
    FuseBiasInLinear(),
    ChangeTrueDivToMulByInverse(),
    FuseBatchNorm1dInLinear(),
    compose(MergeLinears(), FuseBiasInLinear(), ChangeTrueDivToMulByInverse()),
    compose(FuseBatchNorm1dInLinear(), MergeLinears()),
]
ON_CONVOLUTIONS: list[Transformation] = [
    compose(
        FuseBatchNorm2dInConv2d(),
        FuseBatchNormInConvTranspose(),
        FuseBatchNorm1dInConv1d(),
        FuseBatchNorm3dInConv3d(),
    ),
    ChangeTrueDivToMulByInverse(),
]
# torch warns about itself when the pytree of an export graph is copied.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning")
FORMS = ("traced", "exported")
DTYPES = (torch.float32, torch.float64, torch.bfloat16)
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-9, torch.bfloat16: 6e-2}


def drawn(examples: int) -> settings:
    """Return settings that draw so many models, and many more in the profile "nightly"."""
    factor = settings().max_examples / 100 if settings.get_current_profile_name() == "nightly" else 1
    return settings(max_examples=int(examples * factor), deadline=None, suppress_health_check=list(HealthCheck))


def captured(model: nn.Module, form: str, x: Tensor) -> GraphModule:
    """Return a model as a graph of one of the forms, with shapes."""
    if form == "traced":
        return infer_shapes(torch.fx.symbolic_trace(model), x.clone())
    return torch.export.export(model, (x.clone(),), strict=False).module()


def state_of(model: nn.Module) -> list[object]:
    """Return all that a caller could see change: tensors by identity, memory and value, flags, modes, hooks."""
    rows: list[object] = []
    for name, module in model.named_modules():
        rows.append((name, id(module), type(module), module.training, len(module._forward_hooks)))
    for name, tensor in model.state_dict(keep_vars=True).items():
        rows.append(
            (name, id(tensor), tensor.data_ptr(), tensor.requires_grad, tensor.dtype, tensor.detach().clone().tolist())
        )
    return rows


def graph_of(graph_module: GraphModule) -> list[object]:
    """Return the graph and the module tree as plain data, tensors with their values."""
    nodes = [
        (node.name, node.op, str(node.target), str(node.args), str(node.kwargs), sorted(map(str, node.users)))
        for node in iter_nodes(graph_module.graph)
    ]
    modules = [(name, name and type(module).__name__, module.training) for name, module in graph_module.named_modules()]
    tensors = [
        (key, tensor.dtype, tensor.requires_grad, tensor.detach().double().tolist())
        for key, tensor in graph_module.state_dict(keep_vars=True).items()
    ]
    return [nodes, modules, tensors, graph_module.code]


def results(module: Callable[..., Any], x: Tensor) -> list[Tensor | None]:
    """Return outputs, the input as it is afterwards, and the gradient by the input; None where torch refuses one."""
    leaf = x.clone().requires_grad_()
    given_to = leaf * 1.0  # a leaf that needs gradients may not be written in place
    outputs = [output for output in module(given_to) if isinstance(output, Tensor)]
    total = torch.stack([output.double().sum() for output in outputs]).sum()
    gradient: Tensor | None = torch.zeros_like(x)
    if total.requires_grad:
        try:
            (gradient,) = torch.autograd.grad(total, leaf, allow_unused=True, materialize_grads=True)
        except RuntimeError as error:
            if "inplace operation" not in str(error):
                raise
            gradient = None
    return [*outputs, given_to, gradient]


def close(found: list[Tensor | None], expected: list[Tensor | None]) -> None:
    """Check that results agree to the tolerance of their dtype; a gradient that torch refused before may exist now."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        if other is None:
            continue
        assert one is not None
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        rtol = TOLERANCE[other.dtype]
        scale = max(1.0, other.detach().double().abs().max().item() if other.numel() else 1.0)
        torch.testing.assert_close(one, other, rtol=rtol, atol=rtol * scale, equal_nan=True)


def check_everything(model: Generated, transformation: Transformation, form: str, x: Tensor) -> None:
    """Check all properties of one pass on one model."""
    caller = state_of(model)
    expected = results(model, x)
    graph_module = captured(model, form, x)
    before = graph_of(graph_module)
    transformation(graph_module)
    close(results(graph_module, x), expected)
    assert state_of(model) == caller
    after = graph_of(graph_module)
    transformation(graph_module)
    assert graph_of(graph_module) == after
    close(results(copy.deepcopy(graph_module), x), expected)
    if isinstance(transformation, ReversibleTransformation):
        again = copy.deepcopy(graph_module)
        transformation(graph_module, reverse=True)
        assert graph_of(graph_module) == before
        undo(again)
        assert graph_of(again)[0] == before[0]
        assert graph_of(again)[2] == before[2]
    assert state_of(model) == caller


def with_input(model: Generated, dtype: torch.dtype) -> tuple[Generated, Tensor]:
    """Return a model in this dtype, and an input for it."""
    return model.to(dtype), torch.randn(model.shape, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transformation", ON_LINEAR, ids=repr)
@drawn(20)
@given(data=st.data())
def test_linear_models(transformation: Transformation, form: str, data: st.DataObject) -> None:
    model = data.draw(linear_models())
    model, x = with_input(model, data.draw(st.sampled_from(DTYPES)))
    check_everything(model, transformation, form, x)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transformation", ON_CONVOLUTIONS, ids=repr)
@drawn(20)
@given(data=st.data())
def test_convolution_models(transformation: Transformation, form: str, data: st.DataObject) -> None:
    model = data.draw(convolution_models())
    model, x = with_input(model, data.draw(st.sampled_from(DTYPES[:2])))
    check_everything(model, transformation, form, x)


# passes in any order, and what may happen to a model before they are undone

LINEAR_PASSES: st.SearchStrategy[Transformation] = st.sampled_from(
    [
        MergeLinears(),
        MergeLinears(min_group=3),
        MergeLinears(share_storage=True),
        FuseBiasInLinear(),
        ChangeTrueDivToMulByInverse(),
        FuseBatchNorm1dInLinear(),
        DeepCopy(),
        LintAndRecompile(),
    ]
)
CONVOLUTION_PASSES: st.SearchStrategy[Transformation] = st.sampled_from(
    [
        FuseBatchNorm2dInConv2d(),
        FuseBatchNormInConvTranspose(),
        FuseBatchNorm1dInConv1d(),
        FuseBatchNorm3dInConv3d(),
        ChangeTrueDivToMulByInverse(),
        DeepCopy(),
    ]
)


def pipelines(passes: st.SearchStrategy[Transformation]) -> st.SearchStrategy[Transformation]:
    """Draw passes in any order, each at most once, some of them nested."""
    several = st.lists(passes, min_size=1, max_size=4, unique_by=type)
    return st.builds(
        lambda first, rest, inplace: compose(*first[:1], compose(*first[1:]), *rest[:1], inplace=inplace),
        several,
        several,
        st.booleans(),
    )


def cleaned(graph_module: GraphModule) -> GraphModule:
    """Take out what nothing reads."""
    graph_module.graph.eliminate_dead_code()
    return graph_module


Trip: TypeAlias = Callable[[GraphModule], GraphModule]
TRIPS: dict[str, Trip] = {
    "none": lambda graph_module: graph_module,
    "copy": copy.deepcopy,
    "faithful": DeepCopy(),
    "pickle": lambda graph_module: pickle.loads(pickle.dumps(graph_module)),
    "dead code": cleaned,
}


def trained(graph_module: GraphModule, x: Tensor) -> None:
    """Take one step against the gradient of the sum of all outputs; torch may refuse to compute it."""
    parameters = [parameter for parameter in graph_module.parameters() if parameter.requires_grad]
    total = torch.stack([output.double().mean() for output in graph_module(x * 1.0)]).sum()
    if not total.requires_grad:
        return
    try:
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        return
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.sub_(gradient, alpha=0.1)


def doubled(graph_module: GraphModule, x: Tensor) -> None:
    """Go to double precision."""
    graph_module.double()


def loaded(graph_module: GraphModule, x: Tensor) -> None:
    """Load the same values again, as new parameters."""
    graph_module.load_state_dict(copy.deepcopy(graph_module.state_dict()), assign=True)


CHANGES: dict[str, Callable[[GraphModule, Tensor], None]] = {
    "none": lambda graph_module, x: None,
    "doubled": doubled,
    "trained": trained,
    "loaded": loaded,
}


def closely(found: list[object], expected: list[object]) -> None:
    """Check that two descriptions of graphs agree, and their tensors but for rounding."""
    assert found[:2] == expected[:2]
    for (key, *flags, values), (same_key, *same_flags, others) in zip(found[2], expected[2], strict=True):  # type: ignore[call-overload]  # rows of `graph_of`
        assert (key, *flags) == (same_key, *same_flags)
        torch.testing.assert_close(torch.tensor(values), torch.tensor(others), rtol=1e-4, atol=1e-4, equal_nan=True)


def check_pipeline(model: Generated, pipeline: Transformation, form: str, x: Tensor, data: st.DataObject) -> None:
    """Check a pipeline, and that undoing it gives what the untransformed model has become meanwhile."""
    trip, change = data.draw(st.sampled_from(sorted(TRIPS))), data.draw(st.sampled_from(sorted(CHANGES)))
    expected, before = results(model, x), values_of(model)
    twin = captured(copy.deepcopy(model), form, x)
    graph_module = pipeline(captured(model, form, x))
    close(results(graph_module, x), expected)
    assert values_of(model) == before
    graph_module = TRIPS[trip](graph_module)
    close(results(graph_module, x), expected)
    CHANGES[change](graph_module, x)
    CHANGES[change](cleaned(twin) if trip == "dead code" else twin, x)
    former = graph_of(graph_module)
    reverse = data.draw(st.booleans())
    try:
        undone = pipeline(graph_module, reverse=True) if reverse else undo(graph_module)
    except UndoError as error:
        assert change == "trained"
        assert "stand-in" in str(error)
        assert graph_of(graph_module) == former
        return
    except NotReversibleError:
        assert not isinstance(pipeline, ReversibleTransformation)
        assert graph_of(graph_module) == former
        return
    if change == "trained":
        closely(graph_of(undone), graph_of(twin))
    else:
        assert graph_of(undone)[:3] == graph_of(twin)[:3]


@pytest.mark.parametrize("form", FORMS)
@drawn(60)
@given(model=linear_models(), pipeline=pipelines(LINEAR_PASSES), data=st.data())
def test_any_order_on_linear_models(form: str, model: Generated, pipeline: Transformation, data: st.DataObject) -> None:
    model, x = with_input(model, data.draw(st.sampled_from(DTYPES[:2])))
    check_pipeline(model, pipeline, form, x, data)


@pytest.mark.parametrize("form", FORMS)
@drawn(20)
@given(model=convolution_models(), pipeline=pipelines(CONVOLUTION_PASSES), data=st.data())
def test_any_order_on_convolution_models(
    form: str, model: Generated, pipeline: Transformation, data: st.DataObject
) -> None:
    model, x = with_input(model, torch.float64)
    check_pipeline(model, pipeline, form, x, data)


class TwoLayers(nn.Module):
    """Layers that are merged, and layers on the result of one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(4, 3), nn.Linear(4, 2), nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.a(x)
        return self.b(x), self.c(y), self.d(y)


@pytest.mark.parametrize(
    "passes",
    [
        (MergeLinears(), FuseBiasInLinear(), MergeLinears()),
        (FuseBiasInLinear(), MergeLinears(), FuseBiasInLinear(), compose(MergeLinears(), FuseBiasInLinear())),
    ],
    ids=repr,
)
def test_equal_passes_of_a_composition_undo_each_what_it_did(passes: tuple[Transformation, ...]) -> None:
    graph_module = captured(TwoLayers().eval(), "traced", torch.ones(1, 4))
    before = graph_of(graph_module)
    composition = compose(*passes)
    for _ in range(2):
        composition(graph_module)
        assert graph_of(graph_module) != before
        composition(graph_module, reverse=True)
        assert graph_of(graph_module) == before
        assert [record.state for record in history(graph_module)].count("applied") == 0


@pytest.mark.parametrize("transformation", [*ON_LINEAR, ON_CONVOLUTIONS[0]], ids=repr)
@drawn(20)
@given(data=st.data())
def test_a_failure_leaves_no_trace(transformation: Transformation, data: st.DataObject) -> None:
    on_convolutions = transformation is ON_CONVOLUTIONS[0]
    model = data.draw(convolution_models() if on_convolutions else linear_models())
    model, x = with_input(model, torch.float32)
    injector = Injector(data.draw(st.sampled_from(["before", "after"])))
    calls = injector.calls(partial(transformation, captured(copy.deepcopy(model), "traced", x)))
    graph_module = captured(model, "traced", x)
    before, expected = Footprint(graph_module, model), results(model, x)
    call = calls[int(data.draw(st.floats(0, 0.95)) * len(calls))]  # what is cached since makes calls fewer
    with pytest.raises((PassError, InjectedFault)):
        injector.fail(partial(transformation, graph_module), call.number, InjectedFault(f"injected at {call}"))
    assert before.differences(Footprint(graph_module, model)) == []
    close(results(graph_module, x), expected)
