"""`RemoveIdentities`: dropout in eval mode, and identities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from onednn_forms import FORMS, check, operations
from test_pack_convolutions import Computes
from torch import nn

from fxopt_onednn import RemoveIdentities
from fxopt_testing.forms import Form
from fxopt_testing.rewrites import refused

X = torch.randn(2, 3, 8, 8)
DROPOUTS = [
    nn.Identity(), nn.Dropout(), nn.Dropout2d(), nn.AlphaDropout(), nn.FeatureAlphaDropout(), nn.Dropout(0.1, True),
]  # fmt: skip


@pytest.mark.parametrize("dropout", DROPOUTS, ids=str)
def test_modules_in_eval_mode_are_removed(dropout: nn.Module) -> None:
    model = nn.Sequential(nn.ReLU(), dropout, nn.Conv2d(3, 3, 1), nn.Sequential(dropout)).eval()
    found = check(RemoveIdentities(), model, X, sites=2)
    assert operations(found) == ["ReLU", "Conv2d"]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("training", [False, True])
def test_functions_are_removed_where_they_do_not_drop(form: Form, training: bool) -> None:
    model = Computes(lambda m, x: F.dropout(F.relu(x), 0.0, training=m.drops) + 1)
    model.drops = training  # type: ignore[assignment]  # no module
    found = check(RemoveIdentities(), model, X, sites=0 if training else 1, form=form)
    assert ("dropout" in " ".join(operations(found))) == training
    assert [reason for _, reason in refused(found)] == (["training"] if training else [])


def test_dropout_in_train_mode_is_refused() -> None:
    graph_module = RemoveIdentities()(torch.fx.symbolic_trace(nn.Sequential(nn.Dropout(), nn.Identity())))
    assert refused(graph_module) == [("0", "training")]
    assert operations(graph_module) == ["Dropout"]


def test_a_model_of_nothing_but_an_identity() -> None:
    check(RemoveIdentities(), nn.Sequential(nn.Identity()).eval(), X, sites=1)


def test_modules_with_hooks_and_subclasses_stay() -> None:
    class Loud(nn.Identity):
        def forward(self, input: Any) -> Any:
            return input * 2

    hooked = nn.Identity()
    hooked.register_forward_hook(lambda module, args, output: output + 1)
    found = check(RemoveIdentities(), nn.Sequential(hooked, Loud()).eval(), X, sites=0)
    assert operations(found) == ["Identity", "mul"]
