"""Properties of what the result computes, for passes that claim to preserve it."""

from __future__ import annotations

from collections.abc import Iterator

from fxopt_testing.findings import Flaw, OnModel, Property, if_preserving, on_model
from fxopt_testing.outcomes import behaviour_of, unlike
from fxopt_testing.trial import Subject, Trial


def _in_eval_mode(subject: Subject, trial: Trial | None) -> str | None:
    in_train_mode = trial is not None and trial.case.training
    return "models in train mode are checked by train-mode" if in_train_mode else if_preserving(subject, trial)


def _in_train_mode(subject: Subject, trial: Trial | None) -> str | None:
    in_eval_mode = trial is not None and not trial.case.training
    return "the model is in eval mode" if in_eval_mode else if_preserving(subject, trial)


def _same(*kinds: str) -> OnModel:
    """Return a check that the model still does the same, for these kinds: "outputs", "effects", "gradients"."""

    def check(subject: Subject, trial: Trial) -> Iterator[Flaw]:
        for each in trial.differences:
            if each.what in kinds:
                yield Flaw(each.text, "what the model does")

    return check


@on_model(
    "results are the same for every input that the model accepts: other batch sizes, an empty batch, other strides",
    "Bake no size, value or stride of an example into the graph.",
    applies=_in_eval_mode,
)
def other_inputs(subject: Subject, trial: Trial) -> Iterator[Flaw]:
    for name, inputs in trial.case.all_inputs():
        try:
            expected = behaviour_of(trial.source, inputs, gradients=False)
        except Exception:  # the graph is bound to its sizes, or the model takes no such input
            continue
        try:
            found = behaviour_of(trial.done, inputs, gradients=False)
        except Exception as error:
            what = f"with {name}, the result raises {type(error).__name__}: {error!s:.300}"
            yield Flaw(what, "what the model returns")
            return
        for each in unlike(trial.source, trial.done, inputs, expected, found):
            yield Flaw(f"with {name}, {each.text}", "what the model does")


OUTPUTS = Property(
    "same-outputs",
    "the result returns what the model did, to the tolerance of its dtype",
    "Check legality before rewriting: what else reads or writes the values and parameters of the site "
    "(`sharing_refusal`, `tensors_refusal`, `index.effects`)?",
    on_model=_same("outputs"),
    applies=_in_eval_mode,
)
EFFECTS = Property(
    "same-effects",
    "writes into arguments and buffers stay, and so do outputs that share their memory",
    "Keep in-place operations, and the order of writes and reads; return a fresh tensor where the model did.",
    on_model=_same("effects"),
    applies=_in_eval_mode,
)
GRADIENTS = Property(
    "same-gradients",
    "gradients of inputs and remaining parameters are those of the model",
    "Detach nothing in the graph, and compute with the parameters themselves: refuse those that are shared or tied.",
    on_model=_same("gradients"),
    applies=_in_eval_mode,
)
TRAIN_MODE = Property(
    "train-mode",
    "in train mode the result does what the model does, running statistics and dropout included",
    "Leave alone what trains (reason `training`): batch norm takes the statistics of the batch then, and dropout "
    "drops.",
    on_model=_same("outputs", "effects"),
    applies=_in_train_mode,
)
