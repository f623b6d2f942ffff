"""`report`: what passes did to a model, as an HTML page in one file."""

from __future__ import annotations

from torch import nn
from torch.fx import GraphModule

from fxopt_core import ledger_of
from fxopt_report.page import Report
from fxopt_report.pictures import picture
from fxopt_tools import Size, VerificationReport


def report(
    original: nn.Module | None,
    transformed: GraphModule,
    *,
    title: str | None = None,
    verification: VerificationReport | None = None,
) -> Report:
    """Report what passes did to a model: graphs before and after, rewrites, refusals, numbers and memory.

    Nothing is run and nothing is changed.

    Args:
        original: the module before the passes, or None. If it is a graph module, its graph is the graph before;
            otherwise that is read from the ledger, as far as it is recorded.
        transformed: the graph module that the passes ran on.
        title: the heading; by default that of the original's class, or of the transformed module.
        verification: what `verify` returned.

    Raises:
        PreconditionError: ``transformed`` is not a graph module.

    >>> import torch
    >>> from fxopt_core import LintAndRecompile
    >>> graph_module = LintAndRecompile()(torch.fx.symbolic_trace(torch.nn.ReLU()))
    >>> print(report(None, graph_module, title="A model"))
    A model: 0 sites rewritten, 0 refused
    operations: unchanged; nodes: 3 -> 3
    """
    if isinstance(original, GraphModule) and original is transformed:
        original = None  # it was edited in place
    seen = picture(transformed, original)
    return Report(
        title=f"{type(transformed if original is None else original).__name__} after fxopt" if title is None else title,
        picture=seen,
        records=ledger_of(transformed).records,
        after=Size.of(transformed),
        before=None if original is None else Size.of(original),
        verification=verification,
    )
