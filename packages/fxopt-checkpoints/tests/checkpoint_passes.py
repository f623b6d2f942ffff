"""Small passes for the tests of checkpoints: one that joins linear layers, one that folds batch norm, careless ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node

from fxopt_core import Derived, NotReversibleError, Transformation
from fxopt_rewrite import (
    BatchNormCall,
    Editor,
    GraphIndex,
    LinearCall,
    Piece,
    ReversibleSitePass,
    SitePass,
    input_of,
    read_batch_norm,
    read_linear,
)


@dataclass(frozen=True, eq=False)
class Group:
    calls: tuple[LinearCall, ...]

    @property
    def label(self) -> str:
        return " + ".join(call.label for call in self.calls)

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(call.node for call in self.calls)


class Join(ReversibleSitePass[Group]):
    """Linear layers on one value become one; zeros stand in for absent biases. ``sort`` puts the last one first."""

    def __init__(self, *, sort: bool = False) -> None:
        self.sort = sort

    def match(self, index: GraphIndex) -> Iterator[Group]:
        found: dict[Node, list[LinearCall]] = {}
        for node in index.nodes:
            call = read_linear(index, node)
            if isinstance(call, LinearCall) and not self.transformed(node):
                found.setdefault(call.input, []).append(call)
        for calls in found.values():
            if len(calls) > 1:
                yield Group(tuple(reversed(calls)) if self.sort else tuple(calls))

    def rewrite(self, site: Group, edit: Editor) -> None:
        calls, nodes = site.calls, [call.node for call in site.calls]
        biases = [call.bias for call in calls if call.bias is not None]
        sizes = [call.out_features for call in calls]
        module = nn.Linear(calls[0].in_features, sum(sizes), bias=bool(biases))
        module.weight = nn.Parameter(torch.cat([call.weight.tensor.detach() for call in calls]))
        if biases:
            zero = biases[0].tensor.new_zeros
            parts = [zero(n) if c.bias is None else c.bias.tensor.detach() for c, n in zip(calls, sizes, strict=True)]
            module.bias = nn.Parameter(torch.cat(parts))
        first = min(nodes)
        name = edit.add_module(calls[0].module_name, "joined", module.train(calls[0].training))
        whole = edit.call_module(name, calls[0].input, before=first, like=nodes, last_dim=sum(sizes))
        start = 0
        for call, size in zip(calls, sizes, strict=True):
            region = ((0, start, size),)
            edit.replace(
                call.node, edit.call_function(torch.narrow, whole, -1, start, size, before=call.node, like=[call.node])
            )
            pieces: dict[str, Piece | None] = {call.weight.key: Piece(f"{name}.weight", region)}
            if call.bias is not None:
                pieces[call.bias.key] = Piece(f"{name}.bias", region)
            elif biases:
                edit.neutral(Piece(f"{name}.bias", region))
            edit.drop(call, pieces, twin=name)
            start += size


@dataclass(frozen=True, eq=False)
class Pair:
    layer: LinearCall
    norm: BatchNormCall

    @property
    def label(self) -> str:
        return f"{self.layer.label} + {self.norm.label}"

    @property
    def nodes(self) -> tuple[Node, ...]:
        return self.layer.node, self.norm.node


def fold(weight: Tensor, bias: Tensor | None, mean: Tensor, var: Tensor, *, eps: float) -> tuple[Tensor, Tensor]:
    """Return weight and bias of a linear layer with a batch norm without weights behind it."""
    scale = torch.rsqrt(var.double() + eps)
    shift = -scale * mean.double() + (0.0 if bias is None else scale * bias.double())
    return (weight.double() * scale[:, None]).to(weight.dtype), shift.to(weight.dtype)


def unfold(weight: Tensor, bias: Tensor, *, eps: float, shapes: Mapping[str, Any]) -> dict[str, Tensor]:
    """Go back, to an identity; a negative weight is no way back."""
    if not weight.is_meta and bool((weight < -100).any()):
        raise NotReversibleError("a weight is too small")
    zeros = torch.zeros_like(bias)
    found = {"weight": weight, "mean": zeros if shapes["bias"] is not None else -bias, "var": zeros + (1 - eps)}
    return found if shapes["bias"] is None else {**found, "bias": bias}


class Fold(SitePass[Pair]):
    """A batch norm without weights behind a linear layer goes into it; ``back`` says whether it tells the way back."""

    repeats = True
    arithmetic = (fold, unfold)

    def __init__(self, *, back: bool = True) -> None:
        self.back = back

    def match(self, index: GraphIndex) -> Iterator[Pair]:
        for node in index.nodes:
            norm = read_batch_norm(index, node)
            layer = read_linear(index, input_of(node)) if isinstance(norm, BatchNormCall) else None  # type: ignore[arg-type]  # it has one
            if isinstance(norm, BatchNormCall) and isinstance(layer, LinearCall):
                yield Pair(layer, norm)

    def rewrite(self, site: Pair, edit: Editor) -> None:
        layer, norm = site.layer, site.norm
        assert norm.running_mean is not None
        assert norm.running_var is not None
        bias = None if layer.bias is None else layer.bias.tensor
        module = nn.Linear(layer.in_features, layer.out_features).eval()
        inputs = layer.weight.tensor.detach(), bias, norm.running_mean.tensor, norm.running_var.tensor
        weight, shift = fold(*inputs, eps=norm.eps)
        module.weight, module.bias = nn.Parameter(weight), nn.Parameter(shift.detach())
        name = edit.add_module(layer.module_name, f"{layer.module_name.rpartition('.')[2]}_folded", module)
        call = edit.call_module(name, layer.input, before=layer.node, like=[norm.node])
        edit.replace(norm.node, call)
        edit.replace(layer.node, call)
        refs = {"weight": layer.weight, "bias": layer.bias, "mean": norm.running_mean, "var": norm.running_var}
        edit.derived(
            Derived(
                function="checkpoint_passes:fold",
                inputs=tuple((key, None if ref is None else ref.name) for key, ref in refs.items()),
                settings=(("eps", norm.eps),),
                outputs=(f"{name}.weight", f"{name}.bias"),
                restore="checkpoint_passes:unfold" if self.back else None,
            )
        )
        edit.drop(layer, {}, twin=name)
        edit.drop(norm, {}, twin=name)


class Rename(Transformation):
    """Moves a layer to another name, and does not say so."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in list(graph_module.graph.nodes):
            if node.op == "call_module" and node.target == "out":
                graph_module.add_submodule("elsewhere", graph_module.get_submodule("out"))
                node.target = "elsewhere"
                graph_module.delete_submodule("out")
        return graph_module


class CallsJoin(Transformation):
    """A pass of a user that calls another one, and edits nodes besides."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        graph_module = Join()(graph_module)
        for node in list(graph_module.graph.nodes):
            if node.target is torch.relu:
                node.target = torch.tanh
        return graph_module


class Model(nn.Module):
    """Three layers on one value, one of them without bias; a batch norm; a layer that stays; tied layers."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.q = nn.Linear(4, 8)
        self.k = nn.Linear(4, 2, bias=False)
        self.v = nn.Linear(4, 2)
        self.mid = nn.Linear(8, 6)
        self.norm = nn.BatchNorm1d(6, affine=False)
        self.out = nn.Linear(6, 3)
        self.offset = nn.Buffer(torch.ones(1))
        self.scratch = nn.Buffer(torch.ones(2), persistent=False)
        self.one, self.two = nn.Linear(3, 3), nn.Linear(3, 3)
        if tied:
            self.two.weight = self.one.weight

    def forward(self, x: Tensor) -> Any:
        y = torch.relu(self.q(x)) + torch.cat([self.k(x), self.v(x)] * 2, -1)
        z = self.out(self.norm(self.mid(y))) + self.offset
        return self.one(torch.relu(self.two(z))) + self.scratch.sum()


def model(seed: int = 0, *, tied: bool = True) -> Model:
    """Return the model with values of its own everywhere, in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    made = Model(tied=tied).eval()
    with torch.no_grad():
        for name, tensor in (*made.named_parameters(), *made.named_buffers()):
            if tensor.is_floating_point() and name != "scratch":
                tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    return made


class ModuleTracer(torch.fx.Tracer):
    """Leaves torch's own modules whole; buffers that a model reads itself are nodes, not constants."""

    proxy_buffer_attributes = True


def traced(module: nn.Module) -> GraphModule:
    """Return a module as a graph."""
    graph_module = GraphModule(module, ModuleTracer().trace(module))
    graph_module._non_persistent_buffers_set.add("scratch")  # which GraphModule does not keep
    return graph_module
