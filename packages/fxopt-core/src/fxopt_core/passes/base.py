"""`Pass`: the options, signature and traits of every pass."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import suppress
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar

from torch.fx import GraphModule, Node

from fxopt_core.graph import check_graph_module, iter_nodes
from fxopt_core.ledger.marks import META_KEY, tag_of
from fxopt_core.names import note_class
from fxopt_core.naming import kebab_case
from fxopt_core.passes.options import bind
from fxopt_core.passes.signature import signature_of, uuid_of

if TYPE_CHECKING:
    from typing_extensions import Self


class Pass(ABC):
    """Base class of `Transformation`, apart from it because `Transformation` imports the code that runs passes."""

    #: Whether the result computes what the input did, up to rounding.
    preserves_computation: ClassVar[bool] = False

    #: For an approximating pass: the lowest signal-to-noise ratio, in dB, of its result on ordinary data.
    promised_sqnr: ClassVar[float | None] = None

    #: Meaning and remedy of each reason code of a refused site. A subclass's entries add to the inherited ones.
    reasons: ClassVar[Mapping[str, str]] = MappingProxyType({})

    #: The functions that its `Derived` records name: ledgers and key maps may name no others.
    arithmetic: ClassVar[tuple[Callable[..., Any], ...]] = ()

    #: Whether it only replaces the graph's code generator, so that it is run again after an archive is loaded.
    replaces_code_generator: ClassVar[bool] = False

    #: Whether it can be undone: a `ReversibleTransformation` can.
    reversible: ClassVar[bool] = False

    #: The passes that a composition consists of; None for a single pass.
    members: tuple[Pass, ...] | None = None

    _edits: ClassVar[bool] = True  # whether there may be anything to undo
    _copies: ClassVar[bool] = False  # whether it works on a copy of its input

    _bound: dict[str, object]

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Let equality follow the signature where a class does not define it; merge reasons; let `undo` find the class.

        Without an ``__eq__`` of its own, a class would get that of a dataclass or a plain mixin.
        """
        super().__init_subclass__(**kwargs)
        note_class(cls)
        declared = (vars(base).get("reasons", {}) for base in reversed(cls.__mro__))
        cls.reasons = MappingProxyType({code: text for reasons in declared for code, text in reasons.items()})
        base = next(base for base in cls.__mro__[1:] if issubclass(base, Pass))
        if "__eq__" not in vars(cls):
            cls.__eq__ = vars(base)["__eq__"]  # type: ignore[method-assign]  # as a class body would
            cls.__hash__ = vars(cls).get("__hash__", vars(base)["__hash__"])  # type: ignore[method-assign]  # the same

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """Remember the constructor's arguments: they are the options."""
        self = super().__new__(cls)
        object.__setattr__(self, "_bound", bind(cls, args, kwargs))  # a frozen dataclass is a pass, too
        return self

    @abstractmethod
    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Edit a graph module and return it.

        Args:
            graph_module: the module; it is edited in place.

        Returns:
            The same graph module, or a new one.
        """

    @property
    def name(self) -> str:
        """The class name in kebab case.

        >>> from fxopt_core import LintAndRecompile
        >>> LintAndRecompile().name
        'lint-and-recompile'
        """
        return kebab_case(type(self).__name__)

    @property
    def options(self) -> Mapping[str, object]:
        """The constructor's arguments by name, defaults filled in, and containers as they were then.

        Attributes that are set later, such as a counter, change no option; make another pass instead.
        """
        return MappingProxyType(self._bound)

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

    def transformed(self, node: Node) -> bool:
        """Return whether this pass, or one of a composition, marked a node."""
        return any(each.signature in tag_of(node).marks for each in leaves(self))

    def get_transformed_nodes(self, graph_module: GraphModule) -> list[Node]:
        """Return the nodes that this pass, or one of a composition, marked, in order."""
        check_graph_module(graph_module, "get_transformed_nodes")
        signatures = {each.signature for each in leaves(self)}
        tagged = [node for node in iter_nodes(graph_module.graph) if META_KEY in node.meta]
        return [node for node in tagged if not signatures.isdisjoint(tag_of(node).marks)]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Pass):
            return NotImplemented
        return self._identity() == other._identity()

    def __hash__(self) -> int:
        return hash(self._identity())

    def _identity(self) -> object:
        """Return the signature; where an option has no stable value, only the very same object is equal."""
        return signature_or_empty(self) or id(self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in self.options.items())})"


def signature_or_empty(transformation: Pass) -> str:
    """Return a signature, or "" for a pass whose options have no stable value."""
    with suppress(TypeError):
        return transformation.signature
    return ""


def leaves(transformation: Pass) -> list[Pass]:
    """Return the single passes of a composition in order, those of nested ones included; for any other pass, itself."""
    if transformation.members is None:
        return [transformation]
    return [leaf for member in transformation.members for leaf in leaves(member)]
