"""What would take too long to infer: numbers and sequences that a few nodes of a graph can make huge.

Fake tensors have no memory, but Python's own numbers and sequences do: ``pow(10, 10**9)`` is one node.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from torch import Tensor, nn
from torch.fx import Graph, Interpreter, Node

from fxopt_core.errors import PreconditionError


class TooMuchError(PreconditionError):
    """A node makes a number or a sequence that is too large to infer anything of it."""


class BoundedRun(Interpreter):
    """Runs a graph, unless a node of it makes a number or a sequence that is too large.

    >>> from torch.fx import GraphModule
    >>> graph = Graph()
    >>> _ = graph.output(graph.call_function(pow, (10, graph.placeholder("n"))))
    >>> module = GraphModule(nn.Module(), graph)
    >>> BoundedRun(module).run(3)
    1000
    >>> BoundedRun(module).run(10**9)
    Traceback (most recent call last):
    fxopt_rewrite.shapes.effort.TooMuchError: makes an integer of 4000000000 bits, which is too much to infer
    """

    def __init__(self, module: nn.Module, graph: Graph | None = None) -> None:
        super().__init__(module, graph=graph)
        self.extra_traceback = False

    def run_node(self, n: Node) -> Any:
        """Run a node, and check its value."""
        value = super().run_node(n)
        _check(excess_of_result(value))
        return value

    def call_method(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method, unless that would make too much."""
        _check(excess(target, (*args, *kwargs.values())))
        return super().call_method(target, args, kwargs)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a function, unless that would make too much."""
        _check(excess(target, (*args, *kwargs.values())))
        return super().call_function(target, args, kwargs)


def _check(found: str | None) -> None:
    if found is not None:
        raise TooMuchError(f"makes {found}, which is too much to infer")


_BITS = 4096  # of an integer
_LENGTH = 1_000_000  # of a sequence
_NESTED = 50_000  # items in a value, counted as often as they are in there
_TENSORS = 50_000  # that one tensor is taken apart to
_SEQUENCES = (str, bytes, list, tuple, range)
_ITERATING = frozenset({all, any, list, max, min, reversed, sum, tuple})
_NUMBER = frozenset({"comb", "factorial", "perm"})


def excess(target: Any, args: Collection[Any]) -> str | None:
    """Return what is too large in a call of a function or method, before it is made; None if nothing is.

    >>> excess(pow, (10, 10**9)), excess("__mul__", ([0], 10**9)), excess(pow, (10, 9))
    ('an integer of 4000000000 bits', 'a sequence of 1000000000 items', None)
    """
    name = str(getattr(target, "__name__", target)).partition(".")[0].strip("_")
    numbers = [value for value in args if type(value) is int]
    lengths = [_length(value) for value in args if isinstance(value, _SEQUENCES)]
    bits = max((number.bit_length() for number in numbers), default=0)
    if len(numbers) > 1:
        first, second = reversed(numbers[:2]) if name in ("rpow", "rlshift") else numbers[:2]
        if name in ("pow", "ipow", "rpow") and abs(first) > 1:
            bits = max(bits, first.bit_length() * second)
        elif name in ("lshift", "ilshift", "rlshift"):
            bits = max(bits, first.bit_length() + second)
        elif name == "round":
            bits = max(bits, -4 * second)
    if name in _NUMBER:
        bits = max([bits, *(number * number.bit_length() for number in numbers)])
    if name in ("mul", "imul", "rmul") and lengths:
        lengths += [lengths[0] * number for number in numbers]
    parts = 0
    if name == "unbind" or (callable(target) and target in _ITERATING):
        parts = max(map(_size, args), default=0)
    elif name in ("split", "tensor_split", "chunk") and numbers:
        parts = numbers[0] if name != "split" else max(map(_size, args)) // max(1, numbers[0])
    if name == "prod":
        bits = max([bits, *(sum(map(_bits, value)) for value in args if isinstance(value, (list, tuple)))])
    if bits > _BITS:
        return f"an integer of {bits} bits"
    longest = max(lengths, default=0)
    if longest > _LENGTH:
        return f"a sequence of {longest} items"
    return f"a sequence of {parts} tensors" if parts > _TENSORS else None


def _bits(value: object) -> int:
    return value.bit_length() if isinstance(value, int) else 64


def _size(value: object) -> int:
    """Return the largest size of a tensor that is a number."""
    sizes = value.shape if isinstance(value, Tensor) else ()
    return max((size for size in sizes if type(size) is int), default=0)


def _length(value: Any) -> int:
    if isinstance(value, range):  # may be longer than `len` can say
        return max(0, (value.stop - value.start) // value.step)
    return len(value)


def excess_of_result(value: object) -> str | None:
    """Return what is too large in a value that was computed; None if nothing is.

    >>> pair = (0, 0)
    >>> for _ in range(60):
    ...     pair = (pair, pair)
    >>> excess_of_result(pair)
    'more than 50000 items'
    """
    waiting, count = [value], 0
    while waiting:
        item = waiting.pop()
        if isinstance(item, dict):
            item = list(item.values())
        if isinstance(item, (list, tuple)):
            count += len(item)
            waiting.extend(item)
        if count > _NESTED:
            return f"more than {_NESTED} items"
        if type(item) is int and item.bit_length() > _BITS:
            return f"an integer of {item.bit_length()} bits"
    return None
