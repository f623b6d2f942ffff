"""The contract: `Transformation` and `ReversibleTransformation`."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Literal

from torch.fx import GraphModule, Node

from fxopt_core.ledger.marks import set_tag, tag_of
from fxopt_core.passes.base import Pass
from fxopt_core.passes.call import Demands, execute
from fxopt_core.passes.run import editing_run


class Transformation(Pass):
    """A pass over the graph of a ``torch.fx.GraphModule``.

    A subclass implements `transform`, which edits ``graph_module.graph`` and returns the graph module. Calling the pass
    runs it as a transaction: if anything raises, the graph module is as it was.

    The constructor's parameters are the options of the pass, be it a class with an ``__init__`` or a dataclass. They
    make up its `signature`, which marks the nodes that it changed; an equal pass object in another process recognises
    its marks. Other attributes of a pass, and those that it sets while it runs, do not count.

    >>> import operator, torch
    >>> from fxopt_core import iter_nodes
    >>> class MulToAdd(Transformation):
    ...     def transform(self, graph_module):
    ...         for node in iter_nodes(graph_module.graph):
    ...             if node.op == "call_function" and node.target is operator.mul:
    ...                 node.target = operator.add
    ...                 self.mark_as_transformed(node)
    ...         return graph_module
    >>> class Square(torch.nn.Module):
    ...     def forward(self, x):
    ...         return x * x
    >>> graph_module = MulToAdd()(torch.fx.symbolic_trace(Square()))
    >>> graph_module(torch.tensor(3.0))
    tensor(6.)
    """

    def __call__(
        self,
        graph_module: GraphModule,
        lint_and_recompile: bool = True,
        reverse: Literal[False] = False,  # a ReversibleTransformation takes True; any other answers it with an error
        *,
        expect: int | None = None,
        strict: bool = False,
        protect_values: bool = False,
    ) -> GraphModule:
        """Run the pass as a transaction.

        Args:
            graph_module: the module to transform, in place.
            lint_and_recompile: whether to check the graph and to generate its code anew afterwards.
            reverse: whether to undo the pass instead of applying it; only a `ReversibleTransformation` can be.
            expect: how many sites have to be rewritten (a reversal rewrites none); any other number is an error.
            strict: whether a refused site is an error.
            protect_values: whether to copy all tensors first, so that even values which the pass writes in place
                are restored when it fails.

        Returns:
            The transformed graph module.

        Raises:
            PreconditionError: ``graph_module`` is not one, or a site was refused under ``strict``.
            PostconditionError: ``expect`` is not met, or the pass returned no graph module, or a broken graph.
            NotReversibleError: ``reverse`` is set, and the pass is not reversible.
            PassError: The pass raised; its error is chained.
        """
        return execute(self, graph_module, lint_and_recompile, reverse, Demands(expect, strict, protect_values))

    def mark_as_transformed(self, node: Node) -> None:
        """Mark a node as changed by this pass; in the record of the run, it counts as one site.

        Raises:
            TypeError: The pass has no signature.
        """
        tag, signature = tag_of(node), self.signature
        if signature not in tag.marks:
            set_tag(node, replace(tag, marks=(*tag.marks, signature)))
        if (run := editing_run()) is not None:
            run.marked[node] = None


class ReversibleTransformation(Transformation):
    """A pass that can be undone: `reverse` brings back what `transform` changed."""

    reversible = True

    def __call__(
        self,
        graph_module: GraphModule,
        lint_and_recompile: bool = True,
        reverse: bool = False,
        *,
        expect: int | None = None,
        strict: bool = False,
        protect_values: bool = False,
    ) -> GraphModule:
        """Run the pass, or undo it, as a transaction; see `Transformation.__call__`."""
        return execute(self, graph_module, lint_and_recompile, reverse, Demands(expect, strict, protect_values))

    @abstractmethod
    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undo what this pass did to a graph module, and return it.

        `get_transformed_nodes` finds the nodes that it changed; `mark_as_restored` removes a mark.
        """

    def mark_as_restored(self, node: Node) -> None:
        """Remove this pass's mark from a node.

        Raises:
            ValueError: The node was not marked by this pass.
        """
        tag, signature = tag_of(node), self.signature
        if signature not in tag.marks:
            raise ValueError(f"node `{node.name}` was not transformed by {self!r}: see get_transformed_nodes()")
        set_tag(node, replace(tag, marks=tuple(mark for mark in tag.marks if mark != signature)))
        if (run := editing_run()) is not None:
            run.marked.pop(node, None)
