"""Instruments that let some rewrites through and leave others out: the first n, or all but named ones."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from torch.fx import GraphModule, Node

from fxopt_core import Instrument, PassRun, PreconditionError, SitePass
from fxopt_tools.steps import RewriteStep


class BisectLimit(Instrument):
    """Lets the first n rewrites over all passes be done, and none after them.

    Each site of a site pass counts as one rewrite, and each other pass as one as a whole. They are counted in the order
    in which they are done, from 1, over all runs in the ``with`` block; undoing counts for nothing. A rewrite has the
    same number under every limit that lets it through. Passes whose turn comes after the limit is reached do not run.

    Enter it last, so that it counts only what other instruments let through.

    Attributes:
        limit: how many rewrites are done; None for all of them, to count and number them.
        steps: the rewrites that were done, in order.
        left_out: what was not: sites, and passes that did not run.

    >>> import torch
    >>> from fxopt_core import LintAndRecompile, compose, instrumented
    >>> limit = BisectLimit(1, report=print)
    >>> with instrumented(limit):
    ...     _ = compose(LintAndRecompile(), LintAndRecompile())(torch.fx.symbolic_trace(torch.nn.ReLU()))
    BISECT: running pass (1) lint-and-recompile
    BISECT: NOT running pass lint-and-recompile
    """

    def __init__(self, limit: int | None = None, *, report: Callable[[str], object] | None = None) -> None:
        """Start to count.

        Args:
            limit: how many rewrites to do; None for all.
            report: gets a line for each rewrite, as ``BISECT: running pass (3) merge-linears on q + k``.

        Raises:
            PreconditionError: The limit is no number from 0.
        """
        if limit is not None and (type(limit) is not int or limit < 0):
            raise PreconditionError(f"limit is {limit!r}, expected a number of rewrites from 0, or None for all")
        self.limit = limit
        self.steps: list[RewriteStep] = []
        self.left_out: list[RewriteStep] = []
        self._report = report

    @property
    def last(self) -> RewriteStep | None:
        """The last rewrite that was done; None where there was none."""
        return self.steps[-1] if self.steps else None

    def should_run(self, run: PassRun, graph_module: GraphModule) -> bool:
        """Count a pass that has no sites; skip any pass once the limit is reached."""
        if run.reverse:
            return True
        if self._is_reached:
            self._note(RewriteStep.of(None, run), done=False)
            return False
        if not isinstance(run.transformation, SitePass):
            self._note(RewriteStep.of(len(self.steps) + 1, run), done=True)
        return True

    def should_rewrite(self, run: PassRun, graph_module: GraphModule, site: str, nodes: tuple[Node, ...]) -> bool:
        """Count a site, and leave it out once the limit is reached."""
        done = not self._is_reached
        number = len(self.steps) + 1 if done else None
        self._note(RewriteStep.of(number, run, site, nodes), done=done)
        return done

    @property
    def _is_reached(self) -> bool:
        return self.limit is not None and len(self.steps) >= self.limit

    def _note(self, step: RewriteStep, *, done: bool) -> None:
        (self.steps if done else self.left_out).append(step)
        if self._report is not None:
            self._report(f"BISECT: {'' if done else 'NOT '}running {step}")


class LeaveOut(Instrument):
    """Leaves out rewrites that are named, such as the culprit that `bisect` found, and lets all others be done.

    >>> import torch
    >>> from fxopt_core import LintAndRecompile, history, instrumented
    >>> with instrumented(LeaveOut("lint-and-recompile")):
    ...     history(LintAndRecompile()(torch.fx.symbolic_trace(torch.nn.ReLU())))
    ()
    """

    def __init__(self, *left_out: RewriteStep | str) -> None:
        """Prepare to leave out.

        Args:
            left_out: steps, by pass, position of the pass and site; or names of passes, to be left out as a whole.

        Raises:
            PreconditionError: An argument is neither.
        """
        for item in left_out:
            _check_item(item)
        self._passes = {item for item in left_out if isinstance(item, str)}
        self._places = _places(item for item in left_out if isinstance(item, RewriteStep))

    def should_run(self, run: PassRun, graph_module: GraphModule) -> bool:
        """Skip a pass that is left out as a whole."""
        return run.reverse or not (run.name in self._passes or self._has(run, None))

    def should_rewrite(self, run: PassRun, graph_module: GraphModule, site: str, nodes: tuple[Node, ...]) -> bool:
        """Leave a site out."""
        return not self._has(run, site)

    def _has(self, run: PassRun, site: str | None) -> bool:
        indices = self._places.get((run.name, site), set())
        return run.index in indices or (bool(indices) and (run.index is None or None in indices))


def _check_item(item: object) -> None:
    if not isinstance(item, (RewriteStep, str)):
        raise PreconditionError(
            f"LeaveOut is given a {type(item).__name__}, expected steps as BisectLimit counts them (a culprit of "
            "bisect is one), or names of passes"
        )


def _places(steps: Iterable[RewriteStep]) -> dict[tuple[str, str | None], set[int | None]]:
    """Return the positions of passes by pass and site."""
    places: dict[tuple[str, str | None], set[int | None]] = {}
    for step in steps:
        places.setdefault((step.pass_name, step.site), set()).add(step.index)
    return places
