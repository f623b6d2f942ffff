"""`Pattern`: a computation of a few calls, written as a function and found in every form of graph.

The function is traced once, and both it and the graph are read by `read_operation`. Sums and products match in any
order and grouping: ``0.5 * x * y``, ``y * (x / 2)`` and ``x.mul(y).div(2)`` are the same. A quotient is read as a
product with an inverse, a difference as a sum, and ``x.pow(2)``, ``x.square()`` and ``x * x`` are the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from itertools import permutations
from types import MappingProxyType, UnionType
from typing import Annotated, Any, NamedTuple, TypeAlias, Union, get_args, get_origin, get_type_hints

from torch import Tensor, nn
from torch.fx import Graph, Node, Proxy
from torch.fx.proxy import GraphAppendingTracer

from fxopt_rewrite.calls.operation import MODIFIERS, Operation, read_call, read_operation
from fxopt_rewrite.calls.records import Obstacle, TensorRef
from fxopt_rewrite.index import GraphIndex
from fxopt_rewrite.ops.names import MISSING
from fxopt_rewrite.ops.vocabulary import called

_Terms: TypeAlias = "tuple[tuple[Any, int], ...]"  # operands with their signs: -1 if they are subtracted or divided by
_Operands: TypeAlias = "tuple[str, _Terms]"
_Read: TypeAlias = "dict[Node, tuple[Operation | None, _Operands | None]]"
_Pair: TypeAlias = "tuple[Any, Any, int]"  # what is wanted, a value, and the sign of both
#: The operator by which an export checks dtypes. Its calls belong to the match whose values they check.
_CHECK = "_assert_tensor_metadata"
_DIGITS = 1e-6
#: How many nested sums or products are opened, so that time stays linear in long chains.
_DEEPEST = 8


@dataclass(frozen=True, eq=False)
class Match:
    """Calls that compute what a pattern does.

    Attributes:
        pattern: the pattern.
        values: the values of its parameters, by name: nodes, `TensorRef`, numbers, and results of readers.
        nodes: the calls, in the order of the graph, with the dtype checks that an export inserts.
        root: the call whose value is that of the pattern.
    """

    pattern: Pattern
    values: Mapping[str, Any]
    nodes: tuple[Node, ...]
    root: Node

    @property
    def label(self) -> str:
        """The name of the root."""
        return self.root.name

    @property
    def inputs(self) -> tuple[Node, ...]:
        """The nodes outside the match whose values its calls read."""
        found = dict.fromkeys(value for node in self.nodes for value in node.all_input_nodes)
        return tuple(value for value in found if value not in self.nodes)

    def other_reader(self) -> tuple[Node, Node] | None:
        """Return a call other than the root together with a reader of its value outside the match, or None."""
        pairs = ((node, user) for node in self.nodes if node is not self.root for user in node.users)
        return next(((node, user) for node, user in pairs if user not in self.nodes), None)


class Pattern:
    """A computation to look for.

    A parameter without annotation, or with ``Tensor``, stands for a value of the graph. Annotated with
    ``nn.Parameter``, it stands for a parameter or buffer of the model; with ``float`` or ``int``, for a number, or for
    all numbers of a sum or product together; with ``Annotated[..., reader]``, for the result of ``reader`` for the
    index and a node, unless it is None or an `Obstacle`. A parameter that is used twice is the same value each time.
    Numbers are the same if they agree to six digits.

    Args:
        function: the computation, in torch's functions and methods; parameters with a default keep it.
        replacement: a function that computes the same, with the same parameters; see `PatternPass`.
        through: names of operations that may lie between any two calls, such as ``view``.
        kinds: annotations of parameters, for a function that has none.

    Raises:
        ValueError: The function calls what is not torch's, writes in place, or does not use a parameter.

    >>> import torch
    >>> index = GraphIndex(torch.fx.symbolic_trace(lambda x: torch.sigmoid(x * 3).mul(x) / 2))
    >>> def gated(x, factor: float):
    ...     return x * torch.sigmoid(factor * x) * 0.5
    >>> [match.values for node in index.nodes for match in Pattern(gated).matches(index, node)]
    [{'x': x, 'factor': 3.0}]
    """

    def __init__(
        self,
        function: Callable[..., Any],
        replacement: Callable[..., Any] | None = None,
        *,
        through: Collection[str] = (),
        kinds: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        graph = Graph()
        tracer = GraphAppendingTracer(graph)
        self.replacement, self.through = replacement, frozenset(through)
        hints = {**get_type_hints(function, include_extras=True), **kinds}
        self.names = tuple(name for name, each in signature(function).parameters.items() if each.default is each.empty)
        parameters = [graph.placeholder(name) for name in self.names]
        self.kinds: dict[Any, Any] = {each: _kinds_of(hints.get(str(each.target), Node)) for each in parameters}
        result = function(*(Proxy(each, tracer) for each in parameters))
        self.root: Any = getattr(result, "node", None)
        self._calls: dict[Any, Operation] = {}
        self._chains: dict[Any, _Chain] = {}
        for node in graph.nodes:
            call = read_call(node)
            if not node.users and node is not self.root:
                raise ValueError(f"the pattern does not use `{node.target}`")
            if call is not None and not call.inplace:
                self._calls[node] = call
                if (operands := _operands(call)) is not None:
                    self._chains[node] = self._chain(*operands)
            elif node.op != "placeholder":
                raise ValueError(f"a pattern consists of torch's operations that write nothing, unlike `{node.target}`")
        if self.root not in self._calls:
            raise ValueError(f"a pattern has to return what an operation of torch computes, and returns {result!r}")

    def matches(self, index: GraphIndex, node: Node, read: _Read | None = None) -> Iterator[Match]:
        """Yield the ways in which a node computes the pattern.

        Args:
            index: facts about the graph module.
            node: the node.
            read: a cache of what nodes compute; pass the same one for all nodes and patterns.
        """
        chain, target = self._chains.get(self.root), called(node)
        if chain is not None and (target is None or _KINDS.get(target.name) != chain.kind):
            return  # before making a matcher, as for most nodes
        matcher = _Matcher(self, index, {} if read is None else read)
        call, operands = matcher.read(node)
        if call is None or call.name in self.through or (chain is not None and operands is None):
            return
        # `x * 1` would match `x`, too, whatever computes it.
        for found in (each for each in matcher.match(self.root, node, _Found({}, {})) if node in each.nodes):
            values = {name: found.values[name][1] for name in self.names}
            users = (user for each in found.nodes if each is not node for user in each.users)
            checks = [user for user in users if (read_as := matcher.read(user)[0]) and read_as.name == _CHECK]
            yield Match(self, values, tuple(sorted({*found.nodes, *checks}, key=index.position.__getitem__)), node)

    def _chain(self, kind: str, operands: _Terms) -> _Chain:
        parts = list[tuple[Any, int]]()
        for value, sign in operands:
            inner = self._chains.get(value)
            opened = inner.parts if inner is not None and inner.kind == kind else ((value, 1),)
            parts += [(each, own * sign) for each, own in opened]
        unknown = [part for part in parts if self.kinds.get(part[0]) in ((int,), (int, float))]
        numbers = [_signed(kind, *part) for part in parts if _is_number(part[0])]
        if len(unknown) + bool(numbers) > 1 and unknown:
            raise ValueError(f"`{unknown[0][0]}` stands for all numbers of a sum or product, and there is another one")
        terms = [part for part in parts if not _is_number(part[0]) and part not in unknown]
        terms.sort(key=lambda part: part[0] not in self._calls)  # the most selective terms first
        return _Chain(kind, tuple(parts), _joined(kind, numbers), next(iter(unknown), None), tuple(terms))


class _Chain(NamedTuple):
    """A sum or product of a pattern, with nested ones of the same kind flattened.

    Attributes:
        kind: ``add`` or ``mul``.
        parts: all its operands.
        number: the sum or product of its numbers.
        unknown: the parameter that stands for its numbers, or None.
        terms: the other operands.
    """

    kind: str
    parts: _Terms
    number: float
    unknown: tuple[Any, int] | None
    terms: _Terms


class _Found(NamedTuple):
    """The values of parameters found so far, in the graph and as read, and the calls."""

    values: Mapping[str, tuple[Any, Any]]
    nodes: Mapping[Node, None]

    def through(self, *nodes: Node) -> _Found:
        return self._replace(nodes={**self.nodes, **dict.fromkeys(nodes)})


_KINDS = {
    **dict.fromkeys(("add", "sub", "rsub"), "add"),
    **dict.fromkeys(("mul", "div", "neg", "reciprocal", "square", "pow"), "mul"),
}


def _kinds_of(hint: Any) -> tuple[Any, ...]:
    """Return what a parameter with an annotation may stand for."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(kind for each in get_args(hint) for kind in _kinds_of(each))
    kinds: Mapping[Any, Any] = {Any: (Node,), Tensor: (Node,), nn.Parameter: (TensorRef,), float: (int, float)}
    return kinds.get(hint, (hint,))  # type: ignore[no-any-return]


def _is_number(value: object) -> bool:
    # Numbers are compared as floats, which do not represent all larger integers exactly.
    return type(value) is float or (type(value) is int and abs(value) < 2**53)


def _operands(call: Operation) -> _Operands | None:
    """Return the kind and the operands of a sum or product; None for other operations."""
    kind = _KINDS.get(call.name)
    if kind is None or call.inplace or any(call.arguments.get(key, value) != value for key, value in MODIFIERS.items()):
        return None
    operands: tuple[Any, ...] = (*call.operands, None, None)
    first, other = operands[:2]
    if call.name in ("neg", "reciprocal"):
        return kind, ((first, -1),) if call.name == "reciprocal" else ((first, 1), (-1, 1))
    if call.name in ("square", "pow"):
        power = 2 if call.name == "square" else other
        return (kind, ((first, 1),) * int(power)) if _is_number(power) and power in (2, 3, 4) else None
    left, right = (other, first) if call.name == "rsub" else (first, other)
    return kind, ((left, 1), (right, 1 if call.name in ("add", "mul") else -1))


def _signed(kind: str, number: float, sign: int) -> float:
    """Return a number as a summand or factor; with sign -1, its opposite or inverse."""
    # Zero has no inverse: NaN equals no number of a pattern.
    return number * sign if kind == "add" else number if sign > 0 else 1 / number if number else math.nan


def _joined(kind: str, numbers: Collection[float]) -> float:
    return sum(numbers, 0.0) if kind == "add" else math.prod(numbers)


class _Matcher:
    """Compares a pattern with values of one graph, and yields each way to match."""

    def __init__(self, pattern: Pattern, index: GraphIndex, read: _Read) -> None:
        self._pattern, self._index, self._known = pattern, index, read
        self._calls, self._chains = pattern._calls, pattern._chains

    def match(self, wanted: Any, value: Any, found: _Found) -> Iterator[_Found]:
        """Match an argument in the pattern with one in the graph."""
        call, _ = self.read(value)
        if isinstance(wanted, Node):
            chain, mine = self._chains.get(wanted), self._calls.get(wanted)
            if chain is not None:
                yield from self._match_chain(chain, value, found)
                return  # it looks through calls itself
            if mine is None:
                yield from self._bind(wanted, value, found)
            elif call is not None and call.name == mine.name and not call.inplace:
                yield from self._match_arguments(mine, call, found)
        elif isinstance(wanted, tuple) and isinstance(value, tuple) and len(wanted) == len(value):
            yield from self._match_all([(*pair, 1) for pair in zip(wanted, value, strict=True)], found)
        elif _is_same(wanted, value):
            yield found
        if call is not None and call.name in self._pattern.through and call.input is not None:
            yield from self.match(wanted, call.input, found.through(call.node))

    def read(self, value: object) -> tuple[Operation | None, _Operands | None]:
        """Return what a node computes, and its operands if it is a sum or a product."""
        if not isinstance(value, Node):
            return None, None
        if value not in self._known:
            call = read_operation(self._index, value)
            self._known[value] = call, None if call is None else _operands(call)
        return self._known[value]

    def _match_arguments(self, wanted: Operation, call: Operation, found: _Found) -> Iterator[_Found]:
        keys = dict.fromkeys((*wanted.arguments, *call.arguments))
        pairs = [(wanted.arguments.get(key), call.arguments.get(key), 1) for key in keys]
        return self._match_all(pairs, found.through(call.node))

    def _match_all(self, pairs: Sequence[_Pair], found: _Found, kind: str = "") -> Iterator[_Found]:
        if not pairs:
            yield found
        else:
            for first in self._match_term(kind, *pairs[0], found):
                yield from self._match_all(pairs[1:], first, kind)

    def _match_term(self, kind: str, wanted: Any, value: Any, sign: int, found: _Found) -> Iterator[_Found]:
        """Match a term; with sign -1, match one that is the opposite or the inverse of the wanted term."""
        if sign == 1:
            yield from self.match(wanted, value, found)
            return
        chain, mine, other = self._chains.get(wanted), self._calls.get(wanted), self.read(value)[0]
        # `a - 2 * b` may be written `a + -2 * b`, and `a / sqrt(b)` as `a * rsqrt(b)`.
        if kind == "add" and chain is not None and chain.kind == "mul":
            yield from self._match_chain(chain, value, found, -1.0)
        elif kind == "mul" and mine and other and {mine.name, other.name} == {"sqrt", "rsqrt"} and not other.inplace:
            yield from self._match_arguments(mine, other, found)

    def _bind(self, parameter: Node, value: Any, found: _Found) -> Iterator[_Found]:
        name = str(parameter.target)
        if name in found.values:
            if _is_same(found.values[name][0], value):
                yield found
        elif (given := self._given(self._pattern.kinds[parameter], value)) is not MISSING:
            yield found._replace(values={**found.values, name: (value, given)})

    def _given(self, kinds: tuple[Any, ...], value: Any) -> Any:
        """Return what a parameter stands for, if a value is of its kind."""
        node = value.node if isinstance(value, TensorRef) else value
        if get_origin(kinds[0]) is Annotated:
            read = kinds[0].__metadata__[0](self._index, node) if isinstance(node, Node) else None
            return MISSING if read is None or isinstance(read, Obstacle) else read
        tensor = self._index.tensor_of(node) if TensorRef in kinds and isinstance(node, Node) else None
        if isinstance(node, Node) and tensor is not None and self._index.tensor_names(tensor):
            return TensorRef(str(node.target), tensor, node)
        return next((each for each in (value, node) if isinstance(each, kinds) and type(each) is not bool), MISSING)

    def _match_chain(self, wanted: _Chain, value: Any, found: _Found, factor: float = 1.0) -> Iterator[_Found]:
        for numbers, terms, nodes in self._split(wanted.kind, ((value, 1),), len(wanted.terms), _DEEPEST):
            total, known = _joined(wanted.kind, numbers) * factor, iter((found.through(*nodes),))
            if wanted.unknown is not None and numbers:
                parameter, sign = wanted.unknown
                number = _signed(wanted.kind, total, sign)
                # A division by zero, or by a number whose inverse is too large.
                known = self._bind(parameter, number, next(known)) if math.isfinite(number) else iter(())
            elif wanted.unknown is not None or not _is_same(wanted.number, total):
                continue
            for each in known:
                # Each order once, though the terms of `x * x` are equal.
                for order in dict.fromkeys(permutations(terms)):
                    pairs = [(one, two, a * b) for (one, a), (two, b) in zip(wanted.terms, order, strict=True)]
                    yield from self._match_all(pairs, each, wanted.kind)

    def _split(
        self, kind: str, parts: _Terms, count: int, depth: int
    ) -> Iterator[tuple[list[float], _Terms, tuple[Node, ...]]]:
        """Yield the ways to split a sum or product into numbers and ``count`` other terms, with the joining calls."""
        if not parts and not count:
            yield [], (), ()
        # Each part that is not a number makes at least one term.
        if not parts or sum(not _is_number(value) for value, _ in parts) > count:
            return
        (value, sign), *rest = parts
        if _is_number(value):
            for numbers, terms, nodes in self._split(kind, tuple(rest), count, depth):
                yield [_signed(kind, value, sign), *numbers], terms, nodes
            return
        for numbers, terms, nodes in self._split(kind, tuple(rest), count - 1, depth):
            yield numbers, ((value, sign), *terms), nodes
        call, opened = self.read(value) if depth else (None, None)
        if call is not None and call.name in self._pattern.through:
            opened = kind, ((call.input, 1),)
        if call is not None and opened is not None and opened[0] == kind:
            inner = tuple((each, sign * own) for each, own in opened[1])
            for numbers, terms, nodes in self._split(kind, (*inner, *rest), count, depth - 1):
                yield numbers, terms, (call.node, *nodes)


def _is_same(one: Any, other: Any) -> bool:
    if _is_number(one) and _is_number(other):
        return math.isclose(one, other, rel_tol=_DIGITS)
    if isinstance(one, Node) and isinstance(other, Node) and one.op == other.op == "get_attr":
        return one.target == other.target
    if isinstance(one, TensorRef) and isinstance(other, TensorRef):
        return one.tensor is other.tensor
    return one is other or (type(one) is type(other) and not isinstance(one, Tensor) and bool(one == other))
