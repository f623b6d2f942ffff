"""What holds for every pass on every model: same results, an untouched caller, exact undo, no trace of a failure."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from functools import partial
from typing import TypeAlias

import elsewhere
import pytest
import torch
from generated_models import (
    convolution_models,
    drawn,
    dtypes_for,
    inputs_for,
    is_picklable,
    linear_models,
    takes,
)
from generated_operations import Generated
from hypothesis import assume, event, given, strategies as st
from model_pictures import (
    FORMS,
    captured,
    close,
    graph_of,
    other_results,
    results,
    same_but_for_rounding,
    shared_parameters,
    state_of,
)
from torch import Tensor, nn
from torch.fx import GraphModule
from torch.fx.passes.shape_prop import ShapeProp
from torch.utils import _pytree as pytree

from fxopt_arith import ChangeTrueDivToMulByInverse
from fxopt_core import (
    Composition,
    DeepCopy,
    LintAndRecompile,
    NotReversibleError,
    PassError,
    ReversibleTransformation,
    Transformation,
    UndoError,
    compose,
    history,
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
from fxopt_testing.faults import InjectedFault, Injector
from fxopt_testing.footprints import Footprint

FOLDS: tuple[Transformation, ...] = (
    FuseBatchNorm2dInConv2d(),
    FuseBatchNormInConvTranspose(),
    FuseBatchNorm1dInConv1d(),
    FuseBatchNorm3dInConv3d(),
    FuseBatchNorm1dInLinear(),
)
ON_LINEAR: list[Transformation] = [
    MergeLinears(),
    FuseBiasInLinear(),
    ChangeTrueDivToMulByInverse(),
    FuseBatchNorm1dInLinear(),
    compose(MergeLinears(), FuseBiasInLinear(), ChangeTrueDivToMulByInverse()),
    compose(FuseBatchNorm1dInLinear(), MergeLinears()),
]
ON_CONVOLUTIONS: list[Transformation] = [compose(*FOLDS), ChangeTrueDivToMulByInverse()]
# torch warns about itself when the pytree of an export graph is copied.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning")
BATCHES = (1, 0, 5)


def rewritten(graph_module: GraphModule) -> int:
    """Return how many sites were rewritten, and tell it to Hypothesis's statistics."""
    number = sum(len(record.rewrites) for record in history(graph_module))
    event("sites rewritten", "none" if number == 0 else "one" if number == 1 else "several")
    return number


def check_everything(model: Generated, transformation: Transformation, form: str, data: st.DataObject) -> None:
    """Check all properties of one pass on one model."""
    dtype = data.draw(st.sampled_from(dtypes_for(model)))
    model, inputs = model.to(dtype), inputs_for(model.to(dtype), dtype, strided=data.draw(st.booleans()))
    assume(takes(model, inputs))
    others = [inputs_for(model, dtype, batch) for batch in BATCHES]
    graph_module = captured(model, form, inputs)
    caller, before = state_of(model), graph_of(graph_module)
    expected = results(model, inputs)
    on_others = [(inputs, found) for inputs, found in zip(others, other_results(graph_module, others), strict=True)]
    transformation(graph_module)
    rewritten(graph_module)
    close(results(graph_module, inputs), expected)
    for given_to, others_expected in on_others:
        if others_expected is not None:
            close(results(graph_module, given_to), others_expected)
    shared = shared_parameters(model, graph_module)
    close(results(graph_module, inputs, shared), results(model, inputs, shared))
    assert state_of(model) == caller
    after = graph_of(graph_module)
    transformation(graph_module)
    if isinstance(transformation, Composition):  # what a later pass did may be what an earlier one looks for
        close(results(graph_module, inputs), expected)
        assert state_of(model) == caller
        if isinstance(transformation, ReversibleTransformation):
            assert graph_of(graph_module) == after
    else:
        assert graph_of(graph_module) == after
    close(results(copy.deepcopy(graph_module), inputs), expected)
    if isinstance(transformation, ReversibleTransformation):
        again = copy.deepcopy(graph_module)
        transformation(graph_module, reverse=True)
        assert graph_of(graph_module) == before
        undo(again)
        assert graph_of(again)[:2] == before[:2]
        close(results(again, inputs), expected)
    assert state_of(model) == caller


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transformation", ON_LINEAR, ids=repr)
@drawn(6)
@given(data=st.data())
def test_linear_models(transformation: Transformation, form: str, data: st.DataObject) -> None:
    check_everything(data.draw(linear_models()), transformation, form, data)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("transformation", ON_CONVOLUTIONS, ids=repr)
@drawn(6)
@given(data=st.data())
def test_convolution_models(transformation: Transformation, form: str, data: st.DataObject) -> None:
    check_everything(data.draw(convolution_models()), transformation, form, data)


# passes in any order, and what may happen to a model before they are undone

LINEAR_PASSES: tuple[Transformation, ...] = (
    MergeLinears(),
    MergeLinears(min_group=3),
    MergeLinears(share_storage=True),
    FuseBiasInLinear(),
    ChangeTrueDivToMulByInverse(),
    FuseBatchNorm1dInLinear(),
    DeepCopy(),
    LintAndRecompile(),
)
CONVOLUTION_PASSES = (*FOLDS, MergeLinears(), ChangeTrueDivToMulByInverse(), DeepCopy())


def pipelines(passes: tuple[Transformation, ...]) -> st.SearchStrategy[Transformation]:
    """Draw passes in any order, some of them nested."""
    several = st.lists(st.sampled_from(passes), min_size=1, max_size=4, unique_by=type)
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
    "copy": copy.deepcopy,
    "dead code": cleaned,
    "faithful": DeepCopy(),
    "pickle": lambda graph_module: pickle.loads(pickle.dumps(graph_module)),
    "process": elsewhere.passed_on,
    "saved": lambda graph_module: elsewhere.loaded(elsewhere.saved(graph_module)),
}
PICKLING = ("pickle", "process", "saved")


def trained(graph_module: GraphModule, inputs: tuple[Tensor, ...]) -> bool:
    """Take one step against the gradient of the sum of all outputs; return whether torch computes it."""
    parameters = [parameter for parameter in graph_module.parameters() if parameter.requires_grad]
    outputs = pytree.tree_leaves(graph_module(*(x.to(torch.float64) * 1.0 for x in inputs)))
    total = torch.stack([output.double().mean() for output in outputs if isinstance(output, Tensor)]).sum()
    if not total.requires_grad:
        return True
    try:
        gradients = torch.autograd.grad(total, parameters, allow_unused=True)
    except RuntimeError as error:
        if "inplace operation" not in str(error):
            raise
        return False
    with torch.no_grad():
        for parameter, gradient in zip(parameters, gradients, strict=True):
            if gradient is not None:
                parameter.sub_(gradient.clamp(-1.0, 1.0), alpha=0.1)
    return True


def loaded(graph_module: GraphModule, inputs: tuple[Tensor, ...]) -> None:
    """Load the same values again, as new parameters."""
    graph_module.load_state_dict(copy.deepcopy(graph_module.state_dict()), assign=True)


CHANGES: dict[str, Callable[[GraphModule, tuple[Tensor, ...]], object]] = {
    "none": lambda graph_module, inputs: None,
    "doubled": lambda graph_module, inputs: graph_module.double(),
    "halved": lambda graph_module, inputs: graph_module.half(),
    "frozen": lambda graph_module, inputs: graph_module.requires_grad_(False),
    "shapes noted": lambda graph_module, inputs: ShapeProp(graph_module).propagate(*(x * 1.0 for x in inputs)),
    "trained": trained,
    "loaded": loaded,
}


def check_pipeline(model: Generated, pipeline: Transformation, form: str, data: st.DataObject) -> None:
    """Check a pipeline, and that undoing it gives what the untransformed model has become meanwhile."""
    model, inputs = model.to(torch.float64), inputs_for(model, torch.float64)
    possible = sorted(TRIPS if is_picklable(model) else set(TRIPS) - set(PICKLING))
    trips, change = data.draw(st.lists(st.sampled_from(possible), max_size=2)), data.draw(st.sampled_from([*CHANGES]))
    twin = captured(copy.deepcopy(model), form, inputs)
    expected, before = results(model, inputs), state_of(model, memory=False)
    graph_module = pipeline(captured(model, form, inputs))
    rewritten(graph_module)
    close(results(graph_module, inputs), expected)
    assert state_of(model, memory=False) == before
    for trip in trips:
        graph_module = TRIPS[trip](graph_module)
        close(results(graph_module, inputs), expected)
    changed = CHANGES[change](graph_module, inputs)
    twins_changed = CHANGES[change](cleaned(twin) if "dead code" in trips else twin, inputs)
    if change == "trained" and changed and not twins_changed:
        event("torch refuses a gradient of the original")
        return
    how = data.draw(st.sampled_from(["undo", "reverse", *(["elsewhere"] if is_picklable(model) else [])]))
    check_undo(graph_module, twin, pipeline, how, trained=change == "trained", cleaned="dead code" in trips)


def check_undo(
    graph_module: GraphModule, twin: GraphModule, pipeline: Transformation, how: str, *, trained: bool, cleaned: bool
) -> None:
    """Check that undoing gives the twin, or is refused for a reason that there is."""
    former = graph_of(graph_module)
    reversible = pipeline if isinstance(pipeline, ReversibleTransformation) else None
    try:
        if how == "elsewhere":
            undone = elsewhere.undone(graph_module, reversible)
        else:
            undone = pipeline(graph_module, reverse=True) if how == "reverse" else undo(graph_module)  # type: ignore[arg-type]  # or be refused
    except UndoError as error:
        assert trained
        assert "stand-in" in str(error)
        assert graph_of(graph_module) == former
        return
    except NotReversibleError:
        assert reversible is None
        assert graph_of(graph_module) == former
        return
    found, expected = graph_of(undone), graph_of(twin)
    if cleaned:  # a node comes back elsewhere where that behind which it stood was dead code, and is gone
        found[0].sort()
        expected[0].sort()
    if trained:
        assert found[:2] == expected[:2]
        same_but_for_rounding(undone, twin)
    else:
        assert found[:3] == expected[:3]


@pytest.mark.parametrize("form", FORMS)
@drawn(15)
@given(model=linear_models(), pipeline=pipelines(LINEAR_PASSES), data=st.data())
def test_any_order_on_linear_models(form: str, model: Generated, pipeline: Transformation, data: st.DataObject) -> None:
    check_pipeline(model, pipeline, form, data)


@pytest.mark.parametrize("form", FORMS)
@drawn(8)
@given(model=convolution_models(), pipeline=pipelines(CONVOLUTION_PASSES), data=st.data())
def test_any_order_on_convolution_models(
    form: str, model: Generated, pipeline: Transformation, data: st.DataObject
) -> None:
    check_pipeline(model, pipeline, form, data)


REVERSIBLE: tuple[ReversibleTransformation, ...] = (
    MergeLinears(),
    FuseBiasInLinear(),
    ChangeTrueDivToMulByInverse(),
    MergeLinears(min_group=3),
)


@pytest.mark.parametrize("form", FORMS)
@drawn(15)
@given(model=linear_models(), data=st.data())
def test_out_of_order_it_is_right_or_refused(form: str, model: Generated, data: st.DataObject) -> None:
    """Passes one by one, reversed in any order: each reversal is exact or refused, and at last all is as it was."""
    model, inputs = model.to(torch.float64), inputs_for(model, torch.float64)
    graph_module = captured(model, form, inputs)
    start, expected = graph_of(graph_module), results(model, inputs)
    passes = data.draw(st.permutations(REVERSIBLE))
    for transformation in passes:
        transformation(graph_module)
    if data.draw(st.booleans()) and is_picklable(model):
        graph_module = pickle.loads(pickle.dumps(graph_module))
    for transformation in data.draw(st.permutations(passes)):
        former = graph_of(graph_module)
        try:
            transformation(graph_module, reverse=True)
        except UndoError as error:
            event("out of order", "refused")
            assert "Nothing was changed" in str(error)
            assert graph_of(graph_module) == former
        close(results(graph_module, inputs), expected)
    while any(record.state == "applied" and record.changed for record in history(graph_module)):
        undo(graph_module)
    assert graph_of(graph_module)[:3] == start[:3]


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
def test_equal_passes_of_a_composition_undo_each_what_it_did(passes: tuple[ReversibleTransformation, ...]) -> None:
    graph_module = torch.fx.symbolic_trace(TwoLayers().eval())
    before = graph_of(graph_module)
    composition = compose(*passes)
    for _ in range(2):
        composition(graph_module)
        assert graph_of(graph_module) != before
        composition(graph_module, reverse=True)
        assert graph_of(graph_module) == before
        assert [record.state for record in history(graph_module)].count("applied") == 0


@pytest.mark.parametrize("transformation", [*ON_LINEAR, ON_CONVOLUTIONS[0]], ids=repr)
@drawn(6)
@given(data=st.data())
def test_a_failure_leaves_no_trace(transformation: Transformation, data: st.DataObject) -> None:
    on_convolutions = transformation is ON_CONVOLUTIONS[0]
    model: Generated = data.draw(convolution_models() if on_convolutions else linear_models())
    inputs = inputs_for(model, torch.float32)
    injector = Injector(data.draw(st.sampled_from(["before", "after"])))
    calls = injector.calls(partial(transformation, captured(copy.deepcopy(model), "traced", inputs)))
    graph_module = captured(model, "traced", inputs)
    expected = [None if each is None else each.detach() for each in results(graph_module, inputs)]
    before = Footprint(graph_module, model)
    call = calls[int(data.draw(st.floats(0, 0.95)) * len(calls))]  # what is cached since makes calls fewer
    with pytest.raises((PassError, InjectedFault)):
        injector.fail(partial(transformation, graph_module), call.number, InjectedFault(f"injected at {call}"))
    assert before.differences(Footprint(graph_module, model)) == []
    close(results(graph_module, inputs), expected)
