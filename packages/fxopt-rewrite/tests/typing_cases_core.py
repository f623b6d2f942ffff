"""What a type checker sees of core's names: run ``mypy --strict`` over this file.

A line that must not pass carries a ``type: ignore`` with its code; strict mypy reports those that are not needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor
from torch.fx import GraphModule, Node
from typing_extensions import assert_type

from fxopt_core import (
    History,
    PassError,
    Refusal,
    ReversibleTransformation,
    Transformation,
    compose,
    faithful_copy,
    history,
    iter_nodes,
    undo,
)
from fxopt_rewrite import (
    BatchNormCall,
    ConvolutionCall,
    Editor,
    GraphIndex,
    LinearCall,
    Obstacle,
    ReversibleSitePass,
    SitePass,
    TensorRef,
    infer_shapes,
    read_batch_norm,
    read_convolution,
    read_linear,
    tensor_facts,
)


def walking(graph_module: GraphModule) -> None:
    for node in iter_nodes(graph_module.graph):
        assert_type(node, Node)
        _ = node.no_such_attribute  # type: ignore[attr-defined]
        facts = tensor_facts(node)
        if facts is not None:
            assert_type(facts.rank, int)


class Doubles(Transformation):
    def __init__(self, *, where: str = "*") -> None:
        self.where = where

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in self.get_transformed_nodes(graph_module):
            assert_type(node, Node)
            self.mark_as_transformed(node)
            assert_type(self.transformed(node), bool)
        return graph_module


class Wrong(Transformation):
    def transform(self, graph_module: GraphModule) -> None:  # type: ignore[override]
        pass


class Both(ReversibleTransformation):
    def transform(self, graph_module: GraphModule) -> GraphModule:
        return graph_module

    def reverse(self, graph_module: GraphModule) -> GraphModule:
        for node in self.get_transformed_nodes(graph_module):
            self.mark_as_restored(node)
        return graph_module


def running(graph_module: GraphModule) -> None:
    assert_type(Doubles(where="a")(graph_module, expect=1, strict=True, protect_values=True), GraphModule)
    assert_type(Both()(graph_module, True, reverse=True), GraphModule)
    assert_type(compose(Doubles(), Both(), inplace=False), Transformation)
    assert_type(compose(Both(), compose(Both())), ReversibleTransformation)
    assert_type(compose(Both(), Both())(graph_module, reverse=True), GraphModule)
    assert_type(undo(graph_module), GraphModule)
    assert_type(faithful_copy(graph_module), GraphModule)
    assert_type(infer_shapes(graph_module, 1), GraphModule)
    Doubles("a")  # type: ignore[call-arg]  # options are keyword-only
    Doubles(where=3)  # type: ignore[arg-type]
    Doubles()(graph_module, expects=1)  # type: ignore[call-arg]
    Doubles()(graph_module, reverse=True)  # type: ignore[arg-type]  # only what is reversible
    compose(Doubles(), Both())(graph_module, reverse=True)  # type: ignore[arg-type]
    Transformation()  # type: ignore[abstract]
    compose(Doubles)  # type: ignore[call-overload]  # a class in place of an instance
    _ = Doubles().mark_as_restored  # type: ignore[attr-defined]  # only what is reversible


def reading_results(graph_module: GraphModule) -> None:
    assert_type(history(graph_module), History)
    for record in history(graph_module):
        assert_type(record.seconds, float)
        assert_type(record.refusals, tuple[Refusal, ...])
        record.seconds = 1.0  # type: ignore[misc]  # frozen
    try:
        Doubles()(graph_module)
    except PassError as error:
        assert_type(error.pass_name, str | None)
        assert_type(error.index, int | None)


@dataclass(frozen=True)
class Site:
    label: str
    nodes: tuple[Node, ...]
    call: LinearCall


class OnSites(ReversibleSitePass[Site]):
    def match(self, index: GraphIndex) -> Iterator[Site | Refusal]:
        for node in index.nodes:
            call = read_linear(index, node)
            assert_type(call, LinearCall | Obstacle | None)
            if isinstance(call, Obstacle):
                yield Refusal(call.site, call.reason, call.message)
            elif call is not None:
                yield Site(call.label, (node,), call)

    def check(self, site: Site, index: GraphIndex) -> Refusal | None:
        assert_type(site.call.weight, TensorRef)
        assert_type(site.call.bias, TensorRef | None)
        assert_type(site.call.weight.tensor, Tensor)
        return None

    def rewrite(self, site: Site, edit: Editor) -> None:
        assert_type(edit.call_module("name", 1, before=site.nodes[0], like=site.nodes), Node)
        edit.replace(site.nodes[0], "name")  # type: ignore[arg-type]


class NoSite(SitePass[int]):  # type: ignore[type-var]  # a number has no label
    pass


def reading_calls(index: GraphIndex, node: Node) -> None:
    assert_type(read_convolution(index, node), ConvolutionCall | Obstacle | None)
    assert_type(read_batch_norm(index, node), BatchNormCall | Obstacle | None)
    _ = read_linear(index, node).weight  # type: ignore[union-attr]  # it may be an obstacle, or nothing
