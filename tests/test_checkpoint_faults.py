"""Loading a checkpoint of the original model, or asking for one, fails at any call without a trace."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from fault_injection import (
    Action,
    Choice,
    InjectedFault,
    InjectedInterrupt,
    Make,
    Moment,
    at_each_place,
    inject_faults,
    some,
)
from nightly import NIGHTLY
from torch import Tensor, nn
from torch.fx import GraphModule

from fxopt_checkpoints import load_original_state_dict, original_state_dict
from fxopt_core import Transformation, compose
from fxopt_linear import FuseBiasInLinear, MergeLinears
from fxopt_norm import FuseBatchNorm1dInLinear
from fxopt_rewrite import infer_shapes
from fxopt_testing.pictures import bits_of

CHOICE: Choice = at_each_place if NIGHTLY else some(12)
INPUTS = (torch.linspace(-1.0, 1.0, 8).view(2, 4),)


class Model(nn.Module):
    """Layers that are merged, one with a tied bias, and one with a batch norm after it, among layers that stay."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(4, 3), nn.Linear(4, 3, bias=False)
        self.middle, self.norm, self.act = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU()
        self.out, self.last = nn.Linear(4, 2), nn.Linear(4, 2)
        self.last.bias = self.out.bias

    def forward(self, x: Tensor) -> Any:
        y = self.act(self.norm(self.middle(self.q(x) + self.k(x))))
        return self.out(y) * self.last(x)


def model(seed: int) -> nn.Module:
    """Return a model with parameters and statistics of this seed."""
    torch.manual_seed(seed)
    made = Model().eval()
    made.norm.running_mean.normal_()  # type: ignore[union-attr]  # it has statistics
    return made


PASSES: tuple[Transformation, ...] = (
    compose(MergeLinears(), FuseBiasInLinear()),
    compose(FuseBatchNorm1dInLinear(), MergeLinears()),
)


def transformed(passes: Transformation) -> Sequence[nn.Module]:
    """Return a rewritten model, and the original one, which has to stay as it is."""
    original = model(0)
    return passes(infer_shapes(torch.fx.symbolic_trace(original), *INPUTS)), original


def post_hook(module: nn.Module, result: Any) -> None:
    """Is called when everything is loaded."""
    assert module.training is False


def holds(make: Make, action: Action, moment: Moment, error: type[BaseException] = InjectedFault) -> None:
    """Check that no fault leaves a trace."""
    report = inject_faults(make, action, INPUTS, choose=CHOICE, moment=moment, error=error)
    assert report.injected >= 12
    assert not report.traces, "\n".join([str(report), *report.traces[:20]])


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("passes", PASSES, ids=["merge", "fold"])
def test_loading(passes: Transformation, moment: Moment) -> None:
    """With an error or an interrupt."""
    error = InjectedInterrupt if (passes is PASSES[0]) ^ (moment == "after") else InjectedFault
    checkpoint = model(1).state_dict()
    before = bits_of([*checkpoint.values()])

    def make() -> Sequence[nn.Module]:
        made = transformed(passes)
        made[0].register_load_state_dict_post_hook(post_hook)  # type: ignore[no-untyped-call]  # torch's
        return made

    def action(graph_module: GraphModule) -> None:
        result = load_original_state_dict(graph_module, checkpoint)
        assert not result.missing_keys

    holds(make, action, moment, error)
    assert bits_of([*checkpoint.values()]) == before


@pytest.mark.parametrize("moment", ["before", "after"])
@pytest.mark.parametrize("passes", PASSES, ids=["merge", "fold"])
def test_asking(passes: Transformation, moment: Moment) -> None:
    def action(graph_module: GraphModule) -> None:
        original_state_dict(graph_module)

    holds(partial(transformed, passes), action, moment)


def failing_hook(module: nn.Module, result: Any) -> None:
    """Fails when everything is loaded."""
    raise InjectedFault


def test_values_are_not_kept_on_demand() -> None:
    graph_module = transformed(PASSES[0])[0]
    assert isinstance(graph_module, GraphModule)
    graph_module.register_load_state_dict_post_hook(failing_hook)  # type: ignore[no-untyped-call]  # torch's
    before = bits_of([*graph_module.state_dict().values()])
    checkpoint = model(1).state_dict()
    for keeps in (True, False):
        with pytest.raises(InjectedFault):
            load_original_state_dict(graph_module, checkpoint, protect_values=keeps)
        assert (bits_of([*graph_module.state_dict().values()]) == before) is keeps
