"""`SitePass`: a pass as match, check, rewrite over the sites of a graph."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import ClassVar, Generic, Protocol, TypeVar

from torch.fx import GraphModule, Node

from fxopt_core.editor import Editor
from fxopt_core.errors import PostconditionError
from fxopt_core.garbage import collector_paused
from fxopt_core.index import GraphIndex
from fxopt_core.instruments import PassRun, against_rewriting, current_run
from fxopt_core.ledger import Refusal
from fxopt_core.runs import current_frame
from fxopt_core.transformation import ReversibleTransformation, Transformation


class Site(Protocol):
    """A place that a pass may rewrite."""

    @property
    def label(self) -> str:
        """Readable name, for reports."""

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes that it consists of."""


SiteT = TypeVar("SiteT", bound=Site)


class SitePass(Transformation, Generic[SiteT]):
    """A pass that finds sites, checks each for legality, and rewrites the legal ones.

    A subclass says what a site is (a frozen dataclass with ``label`` and ``nodes``) and implements three short
    functions: `match`, `check` and `rewrite`. Core does the rest: refusals and rewrites are recorded, and every edit
    goes through an `Editor`.
    """

    preserves_computation = True
    repeats: ClassVar[bool] = False
    """Whether one rewrite may make way for another, so that the pass goes on until nothing is left to do."""

    @abstractmethod
    def match(self, index: GraphIndex) -> Iterable[SiteT | Refusal]:
        """Return the candidate sites of a graph in order; a near miss may be a refusal right away."""

    def check(self, site: SiteT, index: GraphIndex) -> Refusal | None:
        """Return why a site has to be left alone, or None where it may be rewritten. This changes nothing."""
        return None

    @abstractmethod
    def rewrite(self, site: SiteT, edit: Editor) -> None:
        """Rewrite a legal site."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Match, check and rewrite; return the same graph module."""
        run = current_run()
        if run is None or run.transformation is not self or current_frame(graph_module) is None:
            from fxopt_core.execution import transform_by_hand

            return transform_by_hand(self, graph_module)
        with collector_paused():
            self._rewrite_sites(graph_module)
        return graph_module

    def _rewrite_sites(self, graph_module: GraphModule) -> None:
        index = GraphIndex(graph_module)
        edit = Editor(index, self)
        ask = _Asking(self, graph_module)
        rounds_left = len(index.nodes) + 1 if self.repeats else 1
        refusals, rewritten = self._round(index, edit, ask)
        while rewritten and self.repeats:
            rounds_left -= 1
            if not rounds_left:
                raise PostconditionError(
                    f"pass `{self.name}` finds new sites after every rewrite, without end: its `match` has to leave "
                    "out what its `rewrite` puts in"
                )
            edit.finish()
            edit.index = index = GraphIndex(graph_module)
            refusals, rewritten = self._round(index, edit, ask)
        for refusal in refusals:
            edit.refuse(refusal)
        edit.finish()

    def _round(self, index: GraphIndex, edit: Editor, ask: _Asking) -> tuple[list[Refusal], int]:
        """Rewrite what can be; return the refusals, and how many sites were rewritten."""
        refusals: list[Refusal] = []
        legal: deque[SiteT] = deque()
        for site in self.match(index):  # all checks come before all edits: the index knows the graph as it was
            refusal = site if isinstance(site, Refusal) else self.check(site, index)
            if refusal is not None:
                refusals.append(refusal)
            elif not isinstance(site, Refusal):
                legal.append(site)
        rewritten = 0
        while legal:
            site = legal.popleft()  # and forget it: it may be the last to hold the tensors that its rewrite takes out
            if edit.is_stale(site.nodes):
                gone = next(node.name for node in site.nodes if edit.is_stale([node]))
                message = f"`{site.label}` overlaps another site of the same pass at node `{gone}`, which it took out"
                refusals.append(index.refuse(site.label, "overlapping", message, *site.nodes))
                continue
            vetoed = ask.refusal(site.label, site.nodes)
            if vetoed is not None:
                refusals.append(vetoed)
                continue
            with edit.site(site.label):
                self.rewrite(site, edit)
            rewritten += 1
        return refusals, rewritten


class _Asking:
    """Asks the instruments whether sites are to be rewritten, once for each; what they leave out stays left out."""

    def __init__(self, transformation: Transformation, graph_module: GraphModule) -> None:
        run = current_run()
        mine = run is not None and run.transformation is transformation
        self._run = run if run is not None and mine else PassRun(transformation, parent=run)
        self._graph_module = graph_module
        self._left_out: dict[tuple[Node, ...], Refusal] = {}

    def refusal(self, site: str, nodes: tuple[Node, ...]) -> Refusal | None:
        """Return why a site is left out, or None where it is to be rewritten."""
        if nodes in self._left_out:
            return self._left_out[nodes]
        against = against_rewriting(self._run, self._graph_module, site, nodes)
        if against is None:
            return None
        message = f"instrument {type(against).__name__} does not let `{self._run.name}` rewrite `{site}`"
        self._left_out[nodes] = Refusal(site, "instrument", message, tuple(node.name for node in nodes))
        return self._left_out[nodes]


class ReversibleSitePass(SitePass[SiteT], ReversibleTransformation):
    """A `SitePass` that core can undo from the ledger: its rewrites say where every original tensor went."""

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undo all that an equal pass did to a graph module."""
        from fxopt_core.undo import undo_pass

        return undo_pass(graph_module, self.signature)
