"""Passes that are wrong as objects, or in how they run: options, signatures, errors, cost, what they depend on."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any, ClassVar

import torch
from defects_of_computation import Preserving, calls
from torch import Tensor
from torch.fx import GraphModule, Node

from fxopt_core import Transformation, iter_nodes


class Commuting(Preserving):
    """``x * c`` -> ``c * x``, rightly.

    Args:
        most: up to which constant.
    """

    def __init__(self, *, most: float = 2.0) -> None:
        self.most = most

    def edit(self, graph_module: GraphModule) -> None:
        """Turn products round."""
        for node in self.products(graph_module):
            self.turn(node)

    def products(self, graph_module: GraphModule) -> Iterator[Node]:
        """Yield products by a constant behind the sign."""
        for node in calls(graph_module, operator.mul):
            if isinstance(node.args[1], float) and node.args[1] <= self.most:
                yield node

    def turn(self, node: Node) -> None:
        """Turn one round."""
        node.args = (node.args[1], node.args[0])
        self.mark_as_transformed(node)


class SignsWithoutOption(Commuting):
    """Has a signature that says nothing of its option."""

    @property
    def signature(self) -> str:
        """The same for all options."""
        return "0123456789abcdef" * 4


class SignsByIdentity(Commuting):
    """Has a signature of its own in each object."""

    @property
    def signature(self) -> str:
        """One that depends on where the object lies."""
        return f"{id(self):064x}"


class SignsByRuns(Commuting):
    """Has a signature that counts its runs."""

    runs = 0

    def edit(self, graph_module: GraphModule) -> None:
        """Count."""
        self.runs += 1
        super().edit(graph_module)

    @property
    def signature(self) -> str:
        """One that changes with each run."""
        return f"{self.runs:064x}"


class NeedsPosition(Commuting):
    """Cannot be made from its name."""

    def __init__(self, most: float) -> None:
        super().__init__(most=most)


class NamedBadly(Commuting):
    """Has a name that no text can hold."""

    name = "Named Badly!"


class ReturnsNothing(Transformation):
    """Ends without ``return``."""

    def transform(self, graph_module: GraphModule) -> Any:
        """Forget it."""


class InsertsBehindUse(Preserving):
    """``relu(x)`` -> ``relu(y)``, with ``y`` computed later."""

    def edit(self, graph_module: GraphModule) -> None:
        """Insert it in the wrong place."""
        for node in calls(graph_module, torch.relu):
            with graph_module.graph.inserting_after(node):
                node.args = (graph_module.graph.call_function(operator.neg, (node.args[0],)),)


class NeverCompiles(Commuting):
    """Has a call of its own, which leaves compiling to others whatever it is told."""

    def __call__(self, graph_module: GraphModule, *args: Any, **kwargs: Any) -> GraphModule:
        """Forget the last step."""
        return super().__call__(graph_module, lint_and_recompile=False)


class SwitchesGradientsOff(Commuting):
    """Switches gradients off for good."""

    def edit(self, graph_module: GraphModule) -> None:
        """Switch them off."""
        torch.set_grad_enabled(False)
        super().edit(graph_module)


class WalksTheGraphEachTime(Commuting):
    """Looks at all nodes for each node."""

    def turn(self, node: Node) -> None:
        """Look for what reads the product."""
        if any(other.target == "no such thing" for other in iter_nodes(node.graph)):
            return
        super().turn(node)


class WalksUsersEachTime(Preserving):
    """Looks, at each node, at all users of what it reads."""

    def edit(self, graph_module: GraphModule) -> None:
        """Look at them."""
        for node in iter_nodes(graph_module.graph):
            for value in node.all_input_nodes:
                assert any(user is node for user in reversed(list(value.users)))


class CountsRuns(Commuting):
    """Turns products round in every other run of the process."""

    runs: ClassVar[int] = 0

    def edit(self, graph_module: GraphModule) -> None:
        """Count."""
        CountsRuns.runs += 1
        if CountsRuns.runs % 2:
            super().edit(graph_module)


class CapturesTensor(Preserving):
    """``x * c`` -> a function that holds ``c`` in a closure."""

    def edit(self, graph_module: GraphModule) -> None:
        """Call it."""
        for node in calls(graph_module, operator.mul):
            by = node.args[1]
            if isinstance(by, float):
                factor = torch.tensor(by, dtype=torch.float64)

                def scaled(x: Tensor, factor: Tensor = factor) -> Tensor:
                    return x * factor.item()

                node.target, node.args = scaled, (node.args[0],)


class FindsNothing(Commuting):
    """Looks for what no model has."""

    def products(self, graph_module: GraphModule) -> Iterator[Node]:
        """Yield nothing."""
        yield from ()
