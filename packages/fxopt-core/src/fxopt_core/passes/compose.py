"""`compose`: several passes as one, in one transaction; and the two passes that need no family."""

from __future__ import annotations

import reprlib
from typing import overload

from torch.fx import GraphModule

from fxopt_core.errors import PreconditionError
from fxopt_core.passes.call import Demands, execute, lint_and_recompile
from fxopt_core.passes.transformation import ReversibleTransformation, Transformation
from fxopt_core.state.copying import faithful_copy


class Composition(Transformation):
    """Passes that run one after the other, as one transaction; made by `compose`.

    Attributes:
        transformations: the passes, in the order in which they run.
        inplace: whether the input is edited; if not, a faithful copy of it is.
    """

    name = "compose"

    def __init__(self, *transformations: Transformation, inplace: bool = True) -> None:
        self.members = self.transformations = transformations
        self.inplace = inplace
        self.preserves_computation = all(t.preserves_computation for t in transformations)  # type: ignore[misc]  # a fact about the members here
        self._copies = not inplace  # type: ignore[misc]  # the same

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Run the passes, first to last, as a call of the composition does, but without checking the result."""
        return execute(self, graph_module, False, False, Demands())

    def __repr__(self) -> str:
        members = [*map(repr, self.transformations), *(() if self.inplace else ("inplace=False",))]
        return f"compose({', '.join(members)})"


class ReversibleComposition(Composition, ReversibleTransformation):
    """A composition of reversible passes only."""

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        """Undo the passes, last to first."""
        return execute(self, graph_module, False, True, Demands())


@overload
def compose(*transformations: ReversibleTransformation, inplace: bool = True) -> ReversibleTransformation: ...
@overload
def compose(*transformations: Transformation, inplace: bool = True) -> Transformation: ...
def compose(*transformations: Transformation, inplace: bool = True) -> Transformation:
    """Make one pass of several: the first argument runs first, and reversing undoes the last one first.

    The whole runs as one transaction, and lints and recompiles once, at the end. Without arguments it is the identity;
    with one it behaves as that one. It is reversible exactly if all of its members are.

    Args:
        transformations: the passes.
        inplace: if False, the input is left as it is, and the result shares no mutable state with it.

    Returns:
        The composition.

    Raises:
        PreconditionError: An argument is not an instance of `Transformation`.

    >>> from fxopt_core import DeepCopy, LintAndRecompile
    >>> compose(DeepCopy(), LintAndRecompile())
    compose(DeepCopy(), LintAndRecompile())
    """
    for place, item in enumerate(transformations):
        check_is_transformation(item, f"argument {place} of compose")
    if len(transformations) == 1 and inplace:
        return transformations[0]
    reversible = all(t.reversible for t in transformations)
    return (ReversibleComposition if reversible else Composition)(*transformations, inplace=inplace)


def check_is_transformation(item: object, where: str) -> None:
    """Check that an argument is a pass; if not, raise a `PreconditionError` that says what it is."""
    if not isinstance(item, Transformation):
        found = f"{where} is {reprlib.repr(item)}, expected an instance of fxopt_core.Transformation"
        raise PreconditionError(f"{found}: write {item.__name__}()" if isinstance(item, type) else found)


class DeepCopy(ReversibleTransformation):
    """graph module -> a faithful copy of it that shares no mutable state with it.

    ``copy.deepcopy`` drops hooks and plain attributes, makes non-persistent buffers persistent, and loses the range
    constraints of export graphs; this copy keeps them. Reversing copies, too.

    Cost:
        The memory of the model once more.

    >>> import torch
    >>> graph_module = torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(4, 8)))
    >>> copy = DeepCopy()(graph_module)
    >>> getattr(copy, "0").weight is getattr(graph_module, "0").weight
    False
    """

    preserves_computation = True
    _edits = False

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Return a faithful copy."""
        return faithful_copy(graph_module)

    reverse = transform  # there is nothing to undo


class LintAndRecompile(ReversibleTransformation):
    """graph module -> the same one, its graph checked and its code generated anew.

    Every call of a pass or composition ends with this. As a pass of its own it is for graphs that were edited by hand,
    or by passes that were called with ``lint_and_recompile=False``.

    Cost:
        Linear in the number of nodes. The model is as fast as before.

    >>> import torch
    >>> graph_module = torch.fx.symbolic_trace(torch.nn.ReLU())
    >>> next(node for node in graph_module.graph.nodes if node.op == "call_function").target = torch.sigmoid
    >>> next(node for node in graph_module.graph.nodes if node.op == "call_function").kwargs = {}
    >>> LintAndRecompile()(graph_module)(torch.zeros(1))
    tensor([0.5000])
    """

    preserves_computation = True
    _edits = False

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Check the graph and generate the code."""
        lint_and_recompile(graph_module, self)
        return graph_module

    reverse = transform  # there is nothing to undo
