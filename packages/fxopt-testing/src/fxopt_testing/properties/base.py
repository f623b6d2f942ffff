"""What a property is, and how one is declared."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

from fxopt_testing.findings import Flaw
from fxopt_testing.trial import Subject, Trial

OnModel: TypeAlias = Callable[[Subject, Trial], Iterable[Flaw]]
OnPass: TypeAlias = Callable[[Subject], Iterable[Flaw]]
Applies: TypeAlias = Callable[[Subject, "Trial | None"], "str | None"]


@dataclass(frozen=True)
class Property:
    """Something that holds for every pass.

    Attributes:
        name: what findings call it.
        statement: what holds, in a sentence.
        advice: what to do where it does not.
        on_model: checks it on one model, or None.
        on_pass: checks it on the pass as a whole, or None.
        applies: says why it does not apply, to the pass at all (without a trial) or to one model; or None.
        if_changed: whether it holds by itself where the pass changed nothing.
    """

    name: str
    statement: str
    advice: str
    on_model: OnModel | None = None
    on_pass: OnPass | None = None
    applies: Applies | None = None
    if_changed: bool = True

    def not_applicable(self, subject: Subject, trial: Trial | None = None) -> str | None:
        """Return why it does not apply, or None where it does."""
        return None if self.applies is None else self.applies(subject, trial)


def if_preserving(subject: Subject, trial: Trial | None) -> str | None:
    """Apply to passes that claim to preserve what is computed, on models that compute."""
    if not subject.transformation.preserves_computation:
        return "the pass does not claim preserves_computation"
    return "nothing is computed on the meta device" if trial is not None and trial.case.device == "meta" else None


def if_reversible(subject: Subject, trial: Trial | None) -> str | None:
    """Apply to passes that can be reversed."""
    return None if subject.reversible else "the pass is not reversible"
