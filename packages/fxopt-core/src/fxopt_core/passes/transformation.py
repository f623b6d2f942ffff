"""The contract: `Transformation` and `ReversibleTransformation`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from torch.fx import GraphModule, Node

from fxopt_core.graph import check_graph_module, iter_nodes
from fxopt_core.ledger import marks
from fxopt_core.naming import kebab_case
from fxopt_core.passes.call import Demands, execute
from fxopt_core.passes.context import a_pass_is_running, note_mark
from fxopt_core.passes.options import bind, is_placeholder, kept, takes_no_options
from fxopt_core.passes.signature import signature_of, uuid_of
from fxopt_core.values.names import note_class

if TYPE_CHECKING:
    from typing_extensions import Self


class Transformation(ABC):
    """A pass over the graph of a ``torch.fx.GraphModule``.

    A subclass implements `transform`, which edits ``graph_module.graph`` and returns the graph module. Calling the pass
    runs it as a transaction: if anything raises, the graph module is as it was.

    The constructor's parameters are the options of the pass, be it a class with an ``__init__`` or a dataclass. They
    make up its `signature`, which marks the nodes that it changed; an equal pass object in another process recognises
    its marks. Whatever else a pass stores on itself, and whatever it stores while it runs, counts for nothing.

    >>> import operator, torch
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

    preserves_computation: ClassVar[bool] = False
    """Whether the result computes what the input did, up to rounding."""

    promised_sqnr: ClassVar[float | None] = None
    """For a pass that approximates: the least signal-to-noise ratio, in dB, of its result on ordinary data."""

    reasons: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """For what a site may be left alone: code to meaning and remedy. What a subclass declares adds to the inherited."""

    arithmetic: ClassVar[tuple[Callable[..., Any], ...]] = ()
    """The functions that its `Derived` records name: ledgers and key maps may name no others."""

    replaces_code_generator: ClassVar[bool] = False
    """Whether it only replaces the graph's code generator, so that it is called again on what an archive held."""

    reversible: ClassVar[bool] = False
    """Whether it can be undone: a `ReversibleTransformation` can."""

    undone_by_journal: ClassVar[bool] = False
    """Whether its ``reverse`` undoes the records that it finds in the ledger, and nothing else."""

    _edits: ClassVar[bool] = True  # whether there may be anything to undo
    _copies: ClassVar[bool] = False  # whether it works on a copy of its input

    _bound: dict[str, object]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let equality follow the signature where a class does not define it; merge reasons; let `undo` find the class.

        A dataclass generates ``__eq__`` only where the class has none of its own, and would come before the inherited
        one; so would a plain mixin.
        """
        super().__init_subclass__(**kwargs)
        note_class(cls)
        declared = (vars(base).get("reasons", {}) for base in reversed(cls.__mro__))
        cls.reasons = MappingProxyType({code: text for reasons in declared for code, text in reasons.items()})
        base = next(base for base in cls.__mro__[1:] if issubclass(base, Transformation))
        if "__eq__" not in vars(cls):
            cls.__eq__ = vars(base)["__eq__"]  # type: ignore[method-assign]  # as a class body would
            cls.__hash__ = vars(cls).get("__hash__", vars(base)["__hash__"])  # type: ignore[method-assign]  # the same

    @takes_no_options
    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember the constructor's arguments: they are the options."""
        self = super().__new__(cls)
        options = {name: kept(value) for name, value in bind(cls, args, kwargs).items()}
        object.__setattr__(self, "_bound", options)  # a frozen dataclass is a pass, too
        return self

    if not TYPE_CHECKING:  # type checkers would take a class with this method to have attributes of any name

        def __setattr__(self, name: str, value: object) -> None:
            """Set an attribute; to set one anew that holds an option is to change the option.

            Not so while a pass runs: what it stores then is its own state (a counter). And not so when the constructor
            sets it first: an option is what the constructor is given, so that an equal pass can be made of it.
            """
            options = vars(self).get("_bound", {})
            if name in options and (name in vars(self) or is_placeholder(options[name])) and not a_pass_is_running():
                object.__setattr__(self, "_bound", {**options, name: kept(value)})  # a shallow copy shares the old one
            super().__setattr__(name, value)

    @abstractmethod
    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Edit a graph module and return it.

        Args:
            graph_module: the module; it is edited in place.

        Returns:
            The same graph module, or a new one.
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
            expect: how many sites have to be rewritten; any other number is an error.
            strict: whether a refused site is an error.
            protect_values: whether to copy all tensors first, so that even values which the pass writes in place
                are restored when it fails.

        Returns:
            The transformed graph module.

        Raises:
            PreconditionError: ``graph_module`` is none, or ``strict`` and a site was refused, or something is
                demanded of a reversal.
            PostconditionError: ``expect`` is not met, or the pass returned no graph module, or a broken graph.
            NotReversibleError: ``reverse`` and the pass is not reversible.
            PassError: The pass raised; its error is chained.
        """
        return execute(self, graph_module, lint_and_recompile, reverse, Demands(expect, strict, protect_values))

    @property
    def name(self) -> str:
        """The class name in kebab case.

        >>> from fxopt_core import LintAndRecompile
        >>> LintAndRecompile().name
        'lint-and-recompile'
        """
        return kebab_case(type(self).__name__)

    @property
    def members(self) -> tuple[Transformation, ...] | None:
        """The passes that a composition consists of; None for a single pass."""
        return None

    @property
    def options(self) -> Mapping[str, object]:
        """The constructor's arguments by name, defaults filled in; lists and the like as they were then.

        Setting the attribute of that name anew changes the option, but not while a pass runs.
        """
        given = self._bound.items()
        return MappingProxyType({name: getattr(self, name, v) if is_placeholder(v) else v for name, v in given})

    @property
    def signature(self) -> str:
        """A digest of class and options, equal for equal passes and the same in every process.

        Raises:
            TypeError: An option has no stable value: a lambda, a meta tensor, a sparse tensor.
        """
        return signature_of(type(self), self.options)

    def uuid(self) -> str:
        """A digest of class, options, code and version: a cache key for inductor."""
        return uuid_of(type(self), self.options)

    def mark_as_transformed(self, node: Node) -> None:
        """Mark a node as changed by this pass; in the record of the run, it counts as one site.

        Raises:
            TypeError: The pass has no signature.
        """
        marks.add_mark(node, self.signature)
        note_mark(node, marked=True)

    def transformed(self, node: Node) -> bool:
        """Return whether this pass marked a node."""
        return marks.has_mark(node, self.signature)

    def get_transformed_nodes(self, graph_module: GraphModule) -> list[Node]:
        """Return the nodes that this pass marked, in order."""
        check_graph_module(graph_module, "get_transformed_nodes")
        signature = self.signature
        return [node for node in iter_nodes(graph_module.graph) if marks.has_mark(node, signature)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Transformation):
            return NotImplemented
        try:
            return self is other or self.signature == other.signature
        except TypeError:  # an option without a stable value: only the very same object is equal
            return False

    def __hash__(self) -> int:
        try:
            return hash(self.signature)
        except TypeError:
            return object.__hash__(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"


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

        `get_transformed_nodes` finds what it did; `mark_as_restored` takes a mark off again.
        """

    def mark_as_restored(self, node: Node) -> None:
        """Take this pass's mark off a node.

        Raises:
            ValueError: The node was not marked by this pass.
        """
        if not marks.remove_mark(node, self.signature):
            raise ValueError(
                f"node `{node.name}` was not transformed by {self!r}, so it cannot be marked as restored: only nodes "
                "of get_transformed_nodes() can"
            )
        note_mark(node, marked=False)
