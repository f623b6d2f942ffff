"""Rewrite steps: one site of one pass, or a whole pass that has no sites; instruments that leave some out."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch.fx import GraphModule, Node

from fxopt_core import Instrument, PassRun, PreconditionError
from fxopt_rewrite import SitePass

# A frame as Python's traceback prints it; the line of code may be missing.
_FRAME = re.compile(
    r'File "(?P<file>[^"\n]+)", line (?P<line>\d+), in (?P<function>[^\n]+)(?:\n[ \t]+(?!File ")(?P<code>[^\n]+))?'
)
# Frames that are not the model's: torch as it is installed here or by relative paths, and generated code such as
# "<eval_with_key>.0", which is in no file.
_OF_TORCH = (os.path.join(os.path.dirname(torch.__file__), ""), "torch/", "<")


@dataclass(frozen=True)
class RewriteStep:
    """What a pass does at one site, or as a whole if it is not a site pass.

    Attributes:
        number: its position among all steps of a run, counted from 1; None if unknown.
        pass_name: the pass.
        index: position of the pass in the composition, or None outside one.
        site: name of the site; None for a whole pass.
        nodes: names of the site's nodes.
        sources: the lines of the model's source that these nodes come from, as ``"file:line: code"``.
    """

    number: int | None
    pass_name: str
    index: int | None = None
    site: str | None = None
    nodes: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The pass, and the site if there is one."""
        return self.pass_name if self.site is None else f"{self.pass_name} on {self.site}"

    def __str__(self) -> str:
        """Return pass and site, as ``pass (3) merge-linears on q + k``."""
        return f"pass {'' if self.number is None else f'({self.number}) '}{self.name}"


def source_lines(nodes: Iterable[Node]) -> tuple[str, ...]:
    """Return the source lines that nodes come from, without repeats: for each node the innermost one outside torch.

    They are known only in graphs captured with stack traces: those of ``torch.export``, and of tracers that are asked
    to record them.

    >>> graph = torch.fx.Graph()
    >>> x = graph.placeholder("x")
    >>> x.meta["stack_trace"] = 'File "model.py", line 3, in forward\\n    return self.q(x)'
    >>> source_lines([x, x])
    ('model.py:3: return self.q(x)',)
    """
    frames = (own_frame(str(node.meta.get("stack_trace") or "")) for node in nodes)
    found = ((each["file"], each["line"], each["code"]) for each in frames if each is not None)
    return tuple(dict.fromkeys(f"{file}:{line}{': ' + code.strip() if code else ''}" for file, line, code in found))


def own_frame(trace: str) -> re.Match[str] | None:
    """Return file, line, function and code of the innermost frame outside torch in a stack trace; None without one."""
    own = [found for found in _FRAME.finditer(trace) if not found["file"].startswith(_OF_TORCH)]
    return own[-1] if own else None


class BisectLimit(Instrument):
    """Allows the first n rewrites over all passes, and none after them.

    Each site of a site pass counts as one rewrite, and any other pass as one. Rewrites are numbered from 1 in the order
    in which they happen, over all runs in the ``with`` block; undoing does not count. A rewrite has the same number
    under every limit that allows it. Once the limit is reached, further passes do not run at all. Enter it last, so
    that it counts only what the other instruments allow.

    Attributes:
        limit: how many rewrites to allow; None for all of them, to count and number them.
        steps: the rewrites that were done, in order.

    >>> import torch
    >>> from fxopt_core import LintAndRecompile, compose, instrumented
    >>> limit = BisectLimit(1)
    >>> with instrumented(limit):
    ...     _ = compose(LintAndRecompile(), LintAndRecompile())(torch.fx.symbolic_trace(torch.nn.ReLU()))
    >>> print(*limit.steps)
    pass (1) lint-and-recompile
    """

    def __init__(self, limit: int | None = None) -> None:
        """Start counting.

        Raises:
            PreconditionError: The limit is not a number of at least 0.
        """
        if limit is not None and (type(limit) is not int or limit < 0):
            raise PreconditionError(f"limit is {limit!r}, expected a number of rewrites from 0, or None for all")
        self.limit = limit
        self.steps: list[RewriteStep] = []

    def should_run(self, run: PassRun, graph_module: GraphModule) -> bool:
        """Count a pass that has no sites; skip any pass once the limit is reached."""
        # A site pass is counted site by site in `should_rewrite`. At the limit, it need not look for sites at all.
        has_sites = isinstance(run.transformation, SitePass) and len(self.steps) != self.limit
        return run.reverse or has_sites or self._count(run)

    def should_rewrite(self, run: PassRun, graph_module: GraphModule, site: str, nodes: tuple[Node, ...]) -> bool:
        """Count a site; skip it once the limit is reached."""
        return self._count(run, site, nodes)

    def _count(self, run: PassRun, site: str | None = None, nodes: tuple[Node, ...] = ()) -> bool:
        if len(self.steps) == self.limit:
            return False
        names = tuple(node.name for node in nodes)
        self.steps.append(RewriteStep(len(self.steps) + 1, run.name, run.index, site, names, source_lines(nodes)))
        return True


class LeaveOut(Instrument):
    """Skips the named rewrites, such as the culprit that `bisect` found, and allows all others.

    >>> import torch
    >>> from fxopt_core import LintAndRecompile, history, instrumented
    >>> with instrumented(LeaveOut("lint-and-recompile")):
    ...     history(LintAndRecompile()(torch.fx.symbolic_trace(torch.nn.ReLU())))
    ()
    """

    def __init__(self, *left_out: RewriteStep | str) -> None:
        """Skip steps, identified by pass, position of the pass and site, and whole passes, given by their names."""
        self._left_out = left_out

    def should_run(self, run: PassRun, graph_module: GraphModule) -> bool:
        """Skip a pass that is left out as a whole."""
        return run.reverse or not (run.name in self._left_out or self._has(run, None))

    def should_rewrite(self, run: PassRun, graph_module: GraphModule, site: str, nodes: tuple[Node, ...]) -> bool:
        """Skip a site that is left out."""
        return not self._has(run, site)

    def _has(self, run: PassRun, site: str | None) -> bool:
        steps = (each for each in self._left_out if isinstance(each, RewriteStep))
        found = [step for step in steps if (step.pass_name, step.site) == (run.name, site)]
        # A step from outside a composition has no position; then pass and site decide.
        return any(step.index == run.index or None in (step.index, run.index) for step in found)
