"""Models with many sites, and passes that are wrong at the one that they are told."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, Tracer

from fxopt_core import Transformation, iter_nodes
from fxopt_rewrite import Editor, GraphIndex, SitePass


@dataclass(frozen=True)
class Arithmetic:
    """``x + c`` or ``x * c``."""

    node: Node

    @property
    def label(self) -> str:
        return f"at {self.node.name}"

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.node,)


class Inverse(SitePass[Arithmetic]):
    """Replaces an operation by its inverse with the inverse constant, but for one site, with the constant as it is."""

    old: ClassVar[Callable[..., object]]
    new: ClassVar[Callable[..., object]]

    def __init__(self, *, wrong_at: str = "", raises_at: str = "") -> None:
        self.wrong_at, self.raises_at = wrong_at, raises_at

    def match(self, index: GraphIndex) -> Iterator[Arithmetic]:
        if self.raises_at == "match":
            raise ValueError("cannot match")
        for node in index.nodes:
            if node.target is type(self).old:
                yield Arithmetic(node)

    def constant(self, value: float) -> float:
        raise NotImplementedError

    def rewrite(self, site: Arithmetic, edit: Editor) -> None:
        node = site.node
        if node.name == self.raises_at:
            raise ValueError(f"cannot rewrite {node.name}")
        value, number = node.args
        assert isinstance(number, float)
        constant = number if node.name == self.wrong_at else self.constant(number)
        edit.replace(node, edit.call_function(type(self).new, value, constant, before=node, like=[node]))


class AddToSub(Inverse):
    """``x + c`` -> ``x - (-c)``."""

    old, new = operator.add, operator.sub

    def constant(self, value: float) -> float:
        return -value


class MulToDiv(Inverse):
    """``x * c`` -> ``x / (1 / c)``."""

    old, new = operator.mul, operator.truediv

    def constant(self, value: float) -> float:
        return 1 / value


class DropTail(Transformation):
    """No site pass: the output is what the last operation reads."""

    def __init__(self, *, wrong: bool = True) -> None:
        self.wrong = wrong

    def transform(self, graph_module: GraphModule) -> GraphModule:
        (output,) = (node for node in iter_nodes(graph_module.graph) if node.op == "output")
        (last,) = output.all_input_nodes
        if self.wrong:
            output.replace_input_with(last, last.all_input_nodes[0])
        return graph_module


class Steps(nn.Module):
    """``x * 2 + 3``, again and again."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(self.times):
            x = x * 2.0 + 3.0
            x = x * 0.5
        return x


class TracesStacks(Tracer):
    """Notes where in the model each node comes from."""

    record_stack_traces = True


def steps(times: int) -> GraphModule:
    """Return a graph with ``2 * times`` products and ``times`` sums, which knows its lines of source."""
    model = Steps(times)
    graph: Graph = TracesStacks().trace(model)
    return GraphModule(model, graph)
