"""`SitePass`: a pass as match, check, rewrite over the sites of a graph."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Iterable
from typing import ClassVar, Generic, Protocol, TypeVar

from torch.fx import GraphModule, Node

from fxopt_core import (
    PassRun,
    Refusal,
    ReversibleTransformation,
    Transformation,
    active_instruments,
    collector_paused,
    editing_run,
    undo_pass,
)
from fxopt_core.errors import PostconditionError
from fxopt_rewrite.fast_paths import outside_inference_mode
from fxopt_rewrite.index import GraphIndex
from fxopt_rewrite.journal.editor import Editor
from fxopt_rewrite.reasons import REASONS


class Site(Protocol):
    """A place that a pass may rewrite."""

    @property
    def label(self) -> str:
        """Readable name, for reports."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes of the site."""


SiteT = TypeVar("SiteT", bound=Site)


class SitePass(Transformation, Generic[SiteT]):
    """A pass that finds sites, checks each for legality, and rewrites the legal ones.

    A subclass defines what a site is (a frozen dataclass with ``label`` and ``nodes``) and three short functions:
    `match`, `check` and `rewrite`. Refusals and rewrites are recorded, and every edit goes through an `Editor`.
    """

    preserves_computation = True
    reasons = REASONS
    #: Whether one rewrite may enable another, so that the pass goes on until no site is left.
    repeats: ClassVar[bool] = False

    @abstractmethod
    def match(self, index: GraphIndex) -> Iterable[SiteT | Refusal]:
        """Return the candidate sites of a graph in order; a near miss may be a refusal at once."""

    def check(self, site: SiteT, index: GraphIndex) -> Refusal | None:
        """Return why a site has to be left alone, or None if it may be rewritten; change nothing."""
        return None

    def enables_others(self, site: SiteT) -> bool:
        """Return whether rewriting a site may enable another, so that the pass matches again.

        It is asked before the rewrite, which may remove the nodes of the site.
        """
        return self.repeats

    @abstractmethod
    def rewrite(self, site: SiteT, edit: Editor) -> None:
        """Rewrite a legal site."""

    def settle(self, edit: Editor) -> None:
        """Complete new modules that depend on how their neighbours were rewritten, after all sites."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Match, check and rewrite; return the same graph module."""
        run = editing_run(graph_module)
        # Called as a method: start a run, which records the pass and rolls it back if it fails.
        if run is None or run.transformation is not self:
            return self(graph_module, lint_and_recompile=False)
        with collector_paused(), outside_inference_mode():  # new parameters are to be written and trained anywhere
            self._rewrite_sites(graph_module, run)
        return graph_module

    def _rewrite_sites(self, graph_module: GraphModule, run: PassRun) -> None:
        index = GraphIndex(graph_module)
        edit = Editor(index, self)
        left_out: dict[tuple[Node, ...], Refusal] = {}  # by instruments, in all rounds
        for _ in range(len(index.nodes) + 1):
            refusals, goes_on = self._round(index, edit, run, left_out)
            if not goes_on:
                break
            edit.finish()
            edit.index = index = GraphIndex(graph_module)
        else:
            raise PostconditionError(
                f"pass `{self.name}` finds new sites after every rewrite, without end: its `match` has to skip "
                "what its `rewrite` inserts"
            )
        for refusal in refusals:
            edit.refuse(refusal)
        self.settle(edit)
        edit.finish()

    def _round(
        self, index: GraphIndex, edit: Editor, run: PassRun, left_out: dict[tuple[Node, ...], Refusal]
    ) -> tuple[list[Refusal], bool]:
        """Rewrite the legal sites; return the refusals, and whether new sites may have come up."""
        refusals: list[Refusal] = []
        legal: deque[SiteT] = deque()
        for site in self.match(index):  # before all edits: the index knows the unedited graph
            refusal = site if isinstance(site, Refusal) else self.check(site, index)
            if refusal is not None:
                refusals.append(refusal)
            elif not isinstance(site, Refusal):
                legal.append(site)
        goes_on = False
        while legal:
            site = legal.popleft()  # not kept, as it may hold the tensors that its rewrite removes
            if edit.is_stale(site.nodes):
                gone = next(node.name for node in site.nodes if edit.is_stale([node]))
                message = f"`{site.label}` overlaps another site of the same pass, which removed node `{gone}`"
                refusals.append(index.refuse(site.label, "overlapping", message, *site.nodes))
                continue
            vetoed = left_out.get(site.nodes) or _vetoed(run, index.graph_module, site)
            if vetoed is not None:
                left_out[site.nodes] = vetoed
                refusals.append(vetoed)
                continue
            goes_on |= self.enables_others(site)
            with edit.site(site.label):
                self.rewrite(site, edit)
        return refusals, goes_on


def _vetoed(run: PassRun, graph_module: GraphModule, site: Site) -> Refusal | None:
    """Return the refusal of an instrument that leaves a site out, or None."""
    for instrument in active_instruments():
        decide: Callable[..., bool] | None = getattr(instrument, "should_rewrite", None)
        if decide is not None and not decide(run, graph_module, site.label, site.nodes):
            message = f"instrument {type(instrument).__name__} does not let `{run.name}` rewrite `{site.label}`"
            return Refusal(site.label, "instrument", message, tuple(node.name for node in site.nodes))
    return None


class ReversibleSitePass(SitePass[SiteT], ReversibleTransformation):
    """A `SitePass` that is undone from the ledger, which records where every original tensor went."""

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undo what an equal pass did to a graph module."""
        if editing_run(graph_module) is None:
            return self(graph_module, lint_and_recompile=False, reverse=True)
        return undo_pass(graph_module, self.signature)
