"""What holds for every pass on drawn models: same results, an untouched caller, exact undo, also after journeys."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import elsewhere
import pytest
import torch
from generated_models import Generated
from hypothesis import event, given, strategies as st
from nightly import drawn, mostly_nightly
from torch import nn
from torch.fx import GraphModule

from fxopt_arith import ChangeTrueDivToMulByInverse
from fxopt_core import (
    DeepCopy,
    LintAndRecompile,
    NotReversibleError,
    ReversibleTransformation,
    Transformation,
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
from fxopt_testing import assert_rewrites
from fxopt_testing.forms import TRACED, Form
from fxopt_testing.outcomes import behaviour_of, unlike
from fxopt_testing.pictures import changes, picture
from fxopt_testing.rewrites import FORMS, graph_of, structure
from fxopt_tools import Inputs

FOLDS: tuple[Transformation, ...] = (
    FuseBatchNorm2dInConv2d(),
    FuseBatchNormInConvTranspose(),
    FuseBatchNorm1dInConv1d(),
    FuseBatchNorm3dInConv3d(),
    FuseBatchNorm1dInLinear(),
)
PASSES: tuple[Transformation, ...] = (
    MergeLinears(),
    FuseBiasInLinear(),
    ChangeTrueDivToMulByInverse(),
    compose(*FOLDS),
)
# torch warns about itself when the pytree of an export graph is copied.
pytestmark = pytest.mark.filterwarnings("ignore:`isinstance\\(treespec, LeafSpec\\)` is deprecated:FutureWarning")


def model_of(seed: int, convolutions: bool) -> tuple[nn.Module, torch.Tensor]:
    """Return a model of a seed in eval mode and double precision, and what it is called with."""
    torch.manual_seed(seed)
    model = Generated(seed, convolutions=convolutions).eval().double()
    return model, torch.randn((2, 4, 4, 4) if convolutions else (3, 4), dtype=torch.float64)


@pytest.mark.parametrize("form", mostly_nightly(FORMS, TRACED))  # an export takes seconds
@pytest.mark.parametrize("transformation", PASSES, ids=repr)
@drawn(3)
@given(seed=st.integers(0, 2**20), convolutions=st.booleans())
def test_single_passes(transformation: Transformation, form: Form, seed: int, convolutions: bool) -> None:
    model, x = model_of(seed, convolutions)
    done = transformation(graph_of(copy.deepcopy(model), form, x))
    sites = sum(len(record.rewrites) for record in history(done))
    event("sites rewritten", "none" if sites == 0 else "one" if sites == 1 else "several")
    assert_rewrites(transformation, model, x, count=sites, form=form, others=[(x[:1],), (x[:0],), (x.flip(0),)])


TRIPS: dict[str, Callable[[GraphModule], GraphModule]] = {
    "copy": copy.deepcopy,
    "faithful": DeepCopy(),
    "pickle": lambda graph_module: pickle.loads(pickle.dumps(graph_module)),
    "process": elsewhere.passed_on,
    "saved": lambda graph_module: elsewhere.loaded(elsewhere.saved(graph_module)),
}
CHANGES: dict[str, Callable[[GraphModule], object]] = {
    "none": lambda graph_module: None,
    "halved": nn.Module.half,
    "frozen": lambda graph_module: graph_module.requires_grad_(False),
    "loaded": lambda gm: gm.load_state_dict(copy.deepcopy(gm.state_dict()), assign=True),
}
ANY = (*PASSES[:3], MergeLinears(min_group=3), MergeLinears(share_storage=True), *FOLDS, DeepCopy(), LintAndRecompile())


# Guards of torch.export cannot be pickled, and a capture takes seconds.
@pytest.mark.parametrize("form", mostly_nightly((*TRACED, "capture"), TRACED))
@drawn(7)
@given(data=st.data())
def test_any_order_and_journeys(form: Form, data: st.DataObject) -> None:
    """Undoing a pipeline gives what the untransformed model has become meanwhile, or is refused and changes nothing."""
    model, x = model_of(data.draw(st.integers(0, 2**20)), data.draw(st.booleans()))
    several = st.lists(st.sampled_from(ANY), min_size=1, max_size=4, unique_by=type)
    first, rest = data.draw(several), data.draw(several)
    pipeline = compose(*first[:1], compose(*first[1:]), *rest[:1], inplace=data.draw(st.booleans()))
    source, twin = (graph_of(copy.deepcopy(model), form, x) for _ in range(2))
    expected = behaviour_of(twin, Inputs(x), gradients=False)
    graph_module = pipeline(source)
    trips = data.draw(st.lists(st.sampled_from(sorted(TRIPS)), max_size=2))
    for trip in ("none", *trips):
        if trip != "none":
            graph_module = TRIPS[trip](graph_module)
        assert not unlike(
            twin, graph_module, Inputs(x), expected, behaviour_of(graph_module, Inputs(x), gradients=False)
        )
    change: Callable[[GraphModule], object] = CHANGES[data.draw(st.sampled_from(sorted(CHANGES)))]
    for each in (graph_module, twin):
        change(each)
    reversible: Any = pipeline if isinstance(pipeline, ReversibleTransformation) and pipeline.reversible else None
    former = structure(graph_module)
    try:
        undone = (
            reversible(graph_module, reverse=True) if reversible and data.draw(st.booleans()) else undo(graph_module)
        )
    except NotReversibleError:
        assert reversible is None
        assert structure(graph_module) == former
        return
    assert changes(picture(twin), picture(undone)) == []
