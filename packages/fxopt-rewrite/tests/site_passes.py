"""Sites and passes that tests of rewriting, and of what is built on it, share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.fx import GraphModule, Node, symbolic_trace

from fxopt_core import Refusal
from fxopt_rewrite import Editor, GraphIndex, LinearCall, ReversibleSitePass


@dataclass(frozen=True, eq=False)
class Call:
    """A call, by its node."""

    node: Node

    @property
    def label(self) -> str:
        return self.node.name

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.node,)


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Two calls, of which the second takes what the first gives."""

    first: Node
    second: Node

    @property
    def label(self) -> str:
        return f"{self.first.name} + {self.second.name}"

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.first, self.second)


@dataclass(frozen=True, eq=False)
class LinearSite:
    """A linear layer."""

    call: LinearCall

    @property
    def label(self) -> str:
        return self.call.label

    @property
    def nodes(self) -> tuple[Node, ...]:
        return (self.call.node,)


class Retarget(ReversibleSitePass[Call]):
    """``f(x)`` -> ``g(x)``, but for those that are told to be left alone; the ledger alone undoes it."""

    def __init__(self, old: str = "relu", new: str = "tanh", but: str = "") -> None:
        self.old, self.new, self.but = old, new, but

    def match(self, index: GraphIndex) -> Iterator[Call | Refusal]:
        for node in index.nodes:
            if node.target is getattr(torch, self.old):
                left_alone = index.refuse(node.name, "filtered", f"`{node.name}` is left alone", node)
                yield left_alone if node.name == self.but else Call(node)

    def rewrite(self, site: Call, edit: Editor) -> None:
        new = edit.call_function(getattr(torch, self.new), *site.node.args, before=site.node, like=[site.node])
        edit.replace(site.node, new)


class ReluToClamp(ReversibleSitePass[Call]):
    """``relu(x)`` -> ``clamp_min(x, 0)``."""

    def match(self, index: GraphIndex) -> Iterator[Call]:
        return (Call(node) for node in index.nodes if node.target is torch.relu)

    def rewrite(self, site: Call, edit: Editor) -> None:
        value = edit.call_function(torch.clamp_min, site.node.args[0], 0, before=site.node, like=[site.node])
        edit.replace(site.node, value)


def negated(times: int) -> GraphModule:
    """So many negations in a row."""

    def function(x: Tensor) -> Tensor:
        for _ in range(times):
            x = -x
        return x

    return symbolic_trace(function)
