"""The property that weights come back: with them, the original model computes what the result does."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.fx import GraphModule

from fxopt_checkpoints.arithmetic import WrongWayBackError
from fxopt_checkpoints.load import original_state_dict
from fxopt_core import history
from fxopt_core.errors import CheckpointError, NotReversibleError
from fxopt_testing.findings import Flaw, on_model
from fxopt_testing.outcomes import behaviour_of, differences
from fxopt_testing.properties.result import if_tensors
from fxopt_testing.trial import Subject, Trial


def _returned(graph_module: GraphModule) -> dict[str, Any] | Flaw | None:
    """Return the original state_dict, what is wrong with it, or None where the pass says that there is none."""
    try:
        return original_state_dict(graph_module)
    except WrongWayBackError as error:
        return Flaw(f"original_state_dict refuses: {error}", "a state_dict, or a NotReversibleError of the pass")
    except (NotReversibleError, CheckpointError):
        return None


@on_model(
    "with the weights that come back, the original model computes what the result does, in float32 and bfloat16",
    "Let `restore` of a `Derived` return a tensor for each of its inputs, from which `function` computes the present "
    "values again; where there is none, let it raise a NotReversibleError, or name no `restore`.",
    applies=if_tensors,
)
def checkpoints_return(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    if any(record.rekeyed for record in history(trial.done)):
        return  # `checkpoints-load` says so
    saved = _returned(trial.transformed())
    if isinstance(saved, Flaw):
        yield saved
    elif saved is not None:
        yield from _computes_the_same(trial, saved)
    # bfloat16 rounds the new weights: the way back may then no longer lead to the present values.
    if trial.case.dtype is torch.float32 and trial.case.device != "meta":
        converted = _returned(trial.transformed().to(torch.bfloat16))
        if isinstance(converted, Flaw):
            yield Flaw(f"in bfloat16, {converted.found}", converted.expected)


def _computes_the_same(trial: Trial, saved: dict[str, Any]) -> Iterator[Flaw]:
    original = trial.fresh()
    was = original_state_dict(original)  # without the constants that tracing adds
    if list(saved) != list(was):
        differing = sorted(saved.keys() ^ was.keys()) or ["their order"]
        yield Flaw(f"original_state_dict differs from the original's in {', '.join(differing)}", "the original's keys")
    # Loading is strict, and `saved` lacks the constants that tracing adds.
    original.load_state_dict({**original.state_dict(), **saved})
    if trial.case.device == "meta" or not trial.transformation.preserves_computation:
        return
    found = behaviour_of(original, trial.case.example(), gradients=False)
    for difference in differences(trial.found, found):
        if difference.what == "outputs":
            yield Flaw(f"the original, with the weights that come back: {difference.text}", "what the result does")
