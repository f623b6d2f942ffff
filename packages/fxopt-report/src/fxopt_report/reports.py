"""`report`: what passes did to a model, as an HTML page in one file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn
from torch.fx import GraphModule

from fxopt_core import PreconditionError, ledger_of
from fxopt_report.drawn import DrawnGraph
from fxopt_report.page import Report
from fxopt_report.pictures import picture
from fxopt_tools import Size, VerificationReport
from fxopt_tools.speed import Times


def report(
    original: nn.Module | None,
    transformed: GraphModule,
    *,
    title: str | None = None,
    verification: VerificationReport | None = None,
    speed: Mapping[str, Sequence[float]] | None = None,
    before: DrawnGraph | None = None,
) -> Report:
    """Report what passes did to a model: graphs before and after, rewrites, refusals, numbers, time and memory.

    Nothing is run and nothing is changed.

    Args:
        original: the module before the passes, or None. If it is a graph module, its graph is the graph before;
            otherwise that is read from the ledger, as far as it is recorded.
        transformed: the graph module that the passes ran on.
        title: the heading; by default that of the original's class, or of the transformed module.
        verification: what `verify` returned.
        before: the graph before, kept by `DrawnGraph.of`, where passes change it in place; it holds no tensors.
        speed: seconds of calls, by what was called: ``{"original": [...], "transformed": [...]}``, original first.

    Raises:
        PreconditionError: ``transformed`` is not a graph module, or nothing was measured under a name of ``speed``.

    >>> import torch
    >>> from fxopt_core import LintAndRecompile
    >>> graph_module = LintAndRecompile()(torch.fx.symbolic_trace(torch.nn.ReLU()))
    >>> print(report(None, graph_module, title="A model"))
    A model: 0 sites rewritten, 0 refused
    operations: unchanged; nodes: 3 -> 3
    """
    if isinstance(original, GraphModule) and original is transformed:
        original = None  # it was edited in place
    for name, seconds in (speed or {}).items():
        if not len(seconds):
            raise PreconditionError(f"speed[{name!r}] is empty, expected the seconds of at least one call")
    seen = picture(transformed, original if before is None else before)
    size = None if original is None or seen.before is None else replace(Size.of(original), nodes=len(seen.former))
    return Report(
        title=f"{type(transformed if original is None else original).__name__} after fxopt" if title is None else title,
        picture=seen,
        records=ledger_of(transformed).records,
        after=Size.of(transformed),
        before=size,
        verification=verification,
        speed={name: Times(tuple(map(float, seconds))) for name, seconds in (speed or {}).items()},
    )
