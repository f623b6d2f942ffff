"""Instruments: observers of pass runs, which may also veto a result.

An instrument is scoped by a context manager. The one that was entered first is outermost: it is called first before a
pass, and last after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Protocol

from torch.fx import GraphModule, Node

from fxopt_core.ledger.records import Record
from fxopt_core.passes.run import PassRun


class InstrumentProtocol(Protocol):
    """The interface of an instrument; `Instrument` implements it with methods that do nothing.

    One more method is optional: `Instrument.should_rewrite`, which decides on single sites.

    One attribute is optional. ``runs_module``: whether the instrument runs the module, so that core recompiles it
    first; False if missing, and the code may then be older than the graph.
    """

    def should_run(self, run: PassRun, graph_module: GraphModule) -> bool:
        """Return False to skip the pass."""
        return True

    def before_pass(self, run: PassRun, graph_module: GraphModule) -> None:
        """See the graph module before the pass."""
        return

    def after_pass(self, run: PassRun, graph_module: GraphModule, record: Record) -> bool | None:
        """See the result; return False to have the pass rolled back, raise to have the whole run rolled back.

        When a pass is reversed, the record has state "undone", the rewrites that were taken back, and the time that
        this took.
        """
        return None

    def after_pass_failed(self, run: PassRun, graph_module: GraphModule, error: BaseException) -> None:
        """See the error of a pass that failed or was vetoed; called in place of ``after_pass``."""
        return


class Instrument(InstrumentProtocol):
    """An instrument that does nothing: override what you need.

    >>> import torch
    >>> class Names(Instrument):
    ...     def before_pass(self, run, graph_module):
    ...         print(run.name)
    >>> from fxopt_core import LintAndRecompile
    >>> with instrumented(Names()):
    ...     _ = LintAndRecompile()(torch.fx.symbolic_trace(torch.nn.ReLU()))
    lint-and-recompile
    """

    #: Whether it runs the module, so that core checks and recompiles it first.
    runs_module: bool = False

    def should_rewrite(self, run: PassRun, graph_module: GraphModule, site: str, nodes: tuple[Node, ...]) -> bool:
        """Let the pass rewrite a site; return False to have it refused for the reason "instrument".

        A `SitePass` asks once for each legal site, right before it rewrites the site, in the same order in every run
        on an equal graph. Other passes do not ask.

        Args:
            run: the run of the pass.
            graph_module: what it works on, with the earlier sites rewritten; not recompiled, and not to be changed.
            site: readable name of the site.
            nodes: the nodes of the site.
        """
        return True


_ACTIVE: ContextVar[tuple[InstrumentProtocol, ...]] = ContextVar("fxopt_instruments", default=())


def active_instruments() -> tuple[InstrumentProtocol, ...]:
    """Return the instruments of this context, in the order in which they were entered."""
    return _ACTIVE.get()


@contextmanager
def instrumented(*instruments: InstrumentProtocol) -> Iterator[None]:
    """Let instruments see every pass that runs inside the ``with`` block, those of compositions included.

    The first one is outermost: `should_run` and `before_pass` are called first to last, `after_pass` and
    `after_pass_failed` last to first. Blocks may be nested.
    """
    token = _ACTIVE.set((*_ACTIVE.get(), *instruments))
    try:
        yield
    finally:
        _ACTIVE.reset(token)
