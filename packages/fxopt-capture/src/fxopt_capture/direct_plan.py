"""What a captured module has compiled for its calls: how to recognise the right ones, and what they run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import FunctionType
from typing import Any

from torch.fx import GraphModule
from torch.utils import _pytree as pytree

from .direct_arguments import Recognize, compiled
from .direct_graph import direct_graph, inputs_of

PATIENCE = 8
"""How many calls go the long way first, after the one that begins a plan: compiling takes as long as some thirty calls
save, and a module that is being rewritten is called a few times only."""
_MOST_WAYS = 64
"""Of giving the same arguments, in another order by name each: further ones are not compiled."""


class DirectPlan:
    """The compiled functions of one captured module, for as long as its ``forward`` and its binding are these.

    Args:
        forward: the function of its class that the plan stands for.
        binding: the `InputBinding`.

    Attributes:
        calls: how many have not been recognised, as there was nothing compiled for them.
        run: takes the module and the graph's inputs, flat; see `direct_graph`.
        ways: the function that recognises calls, for each way in which arguments have been given: for a number of
            positional arguments, or a tuple of that number and the names of keyword arguments. None where none of these
            calls is recognised.
    """

    def __init__(self, forward: object = None, binding: object = None) -> None:
        self.forward, self.binding = forward, binding
        self.calls = 0
        self.run: Callable[..., Any] = _nothing
        self.ways: dict[object, Recognize | None] = {}

    def learn(self, module: GraphModule, guards: Any, args: Sequence[object], kwargs: Mapping[str, object]) -> None:
        """Compile what calls need that give their arguments in the same way as this one, once there have been enough.

        Args:
            module: the captured module.
            guards: its `InputGuards`.
            args: positional arguments.
            kwargs: keyword arguments.
        """
        self.calls += 1
        if self.calls < PATIENCE or len(self.ways) >= _MOST_WAYS or not isinstance(self.forward, FunctionType):
            return
        in_spec = vars(module).get("_in_spec", _by_name(self.forward))
        recognize = compiled(self.binding, guards, in_spec, len(args), tuple(kwargs))
        if recognize is not None and self.run is _nothing:
            self.run = direct_graph(module, self.forward, guards) or _nothing
        self.ways[(len(args), *kwargs) if kwargs else len(args)] = None if self.run is _nothing else recognize


def _nothing(*inputs: object) -> object:
    return NotImplemented


def _by_name(forward: FunctionType) -> pytree.TreeSpec:
    """Return how the inputs nest of a graph that is called as its ``forward`` says."""
    return pytree.tree_structure(((), dict.fromkeys(inputs_of(forward), 0)))
