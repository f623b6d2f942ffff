"""Sites and passes that tests of rewriting, and of what is built on it, share."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node, symbolic_trace

from fxopt_core import Refusal, iter_nodes
from fxopt_rewrite import (
    Editor,
    GraphIndex,
    LinearCall,
    Piece,
    ReversibleSitePass,
    read_linear,
    tensors_refusal,
)


def nodes_of(graph_module: GraphModule) -> dict[str, Node]:
    """The nodes of a graph by their names."""
    return {node.name: node for node in iter_nodes(graph_module.graph)}


def exported(model: nn.Module, *args: Any, **kwargs: Any) -> GraphModule:
    """The graph of a model as torch exports it."""
    graph_module = torch.export.export(model, args, kwargs, strict=False).module()
    assert isinstance(graph_module, GraphModule)
    return graph_module


class Called(nn.Module):
    """A function or a module as a model."""

    def __init__(self, function: Callable[[Any], Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x)


class Computes(nn.Module):
    """Layers and tensors by name, and what is done with them and an input."""

    def __init__(self, function: Callable[[Any, Any], Any], **parts: object) -> None:
        super().__init__()
        self.computes = function
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, x: Tensor) -> Any:
        return self.computes(self, x)


class Conv1D(nn.Module):
    """What transformers calls so: a linear layer with its weight transposed."""

    def __init__(self, nf: int, nx: int) -> None:
        super().__init__()
        self.nf, self.nx = nf, nx
        self.weight, self.bias = nn.Parameter(torch.randn(nx, nf)), nn.Parameter(torch.randn(nf))

    def forward(self, x: Tensor) -> Tensor:
        size_out = x.size()[:-1] + (self.nf,)  # noqa: RUF005  # a proxy is not unpacked
        return torch.addmm(self.bias, x.view(-1, x.size(-1)), self.weight).view(size_out)


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


class PadLinear(ReversibleSitePass[LinearSite]):
    """``linear(x)`` -> ``narrow(padded(x), -1, 0, n)``, where padded has rows of zeros below."""

    def __init__(self, *, rows: int = 2, suffix: str = "", early: bool = False) -> None:
        self.rows = rows
        self.suffix = suffix
        self.early = early  # whether the call goes to the front, as far as its input allows

    def match(self, index: GraphIndex) -> Iterator[LinearSite]:
        for node in index.nodes:
            call = read_linear(index, node)
            if isinstance(call, LinearCall) and call.label.endswith(self.suffix) and not self.transformed(node):
                yield LinearSite(call)

    def check(self, site: LinearSite, index: GraphIndex) -> Refusal | None:
        return tensors_refusal(site.call, index)

    def rewrite(self, site: LinearSite, edit: Editor) -> None:
        call, node = site.call, site.call.node
        size, total = call.out_features, call.out_features + self.rows
        local = (call.label if call.module_name else call.weight.name).rpartition(".")[2]
        module = nn.Linear(call.in_features, total, bias=call.bias is not None, dtype=call.weight.tensor.dtype)
        for key, ref in (("weight", call.weight), ("bias", call.bias)):
            if ref is not None:
                padded = torch.cat([ref.tensor.detach(), ref.tensor.new_zeros(self.rows, *ref.tensor.shape[1:])])
                setattr(module, key, nn.Parameter(padded, requires_grad=ref.tensor.requires_grad))
        name = edit.add_module(call.module_name or call.weight.name, f"{local}_padded", module.train(call.training))
        place = call.input.next if self.early else node
        wide = edit.call_module(name, call.input, before=place, like=[node], last_dim=total)
        edit.replace(node, edit.call_function(torch.narrow, wide, -1, 0, size, before=place, like=[node]))
        pieces: dict[str, Piece | None] = {}
        for ref in call.tensors:
            pieces[ref.key] = Piece(f"{name}.{ref.key}", ((0, 0, size),))
            edit.neutral(Piece(f"{name}.{ref.key}", ((0, size, self.rows),)))
        edit.drop(call, pieces, twin=name)


def negated(times: int) -> GraphModule:
    """So many negations in a row."""

    def function(x: Tensor) -> Tensor:
        for _ in range(times):
            x = -x
        return x

    return symbolic_trace(function)
