"""What a pipeline makes of a model when parts of it are left out: passes, or single sites."""

from __future__ import annotations

from collections.abc import Collection
from typing import Literal

from torch.fx import GraphModule

from fxopt_core import PassRun, PreconditionError, Record, Transformation, faithful_copy, instrumented
from fxopt_tools.limits import BisectLimit, LeaveOut
from fxopt_tools.steps import RewriteStep

Part = Literal["pass", "site"]


class _Counting(BisectLimit):
    """Counts sites, and notes the passes that changed something."""

    may_veto = False

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[RewriteStep] = []

    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> None:
        if record.changed and (run.index is not None or run.parent is None):  # no pass inside of another one
            self.passes.append(RewriteStep.of(None, run))


class Variants:
    """Makes variants of one model by one pipeline; the model stays as it is."""

    def __init__(self, graph_module: GraphModule, transformation: Transformation) -> None:
        self._graph_module, self._transformation = graph_module, transformation

    def original(self) -> GraphModule:
        """Return a copy of the model."""
        return faithful_copy(self._graph_module)

    def without(self, left_out: Collection[RewriteStep]) -> GraphModule:
        """Return what the pipeline makes of a copy, with these steps left out.

        Raises:
            PassError: A pass fails.
        """
        with instrumented(LeaveOut(*left_out)):
            return self._transformation(self.original())

    def parts(self, part: Part) -> list[RewriteStep]:
        """Return the passes that change the model, or the sites that they rewrite, in order, each once.

        A pass without sites counts as one site, where it changes the model.

        Raises:
            PassError: A pass fails.
            PreconditionError: It is neither "pass" nor "site".
        """
        if part not in ("pass", "site"):
            raise PreconditionError(f"per is {part!r}, expected 'pass' or 'site'")
        counting = _Counting()
        with instrumented(counting):
            self._transformation(self.original())
        changed = {step.place for step in counting.passes}
        found = counting.passes
        if part == "site":
            found = [s for s in counting.steps if s.site is not None or s.place in changed]
        return list({step.place: step for step in found}.values())
