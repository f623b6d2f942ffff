"""What was done survives what others do to the graph module; where it cannot, undo says why and changes nothing."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable
from functools import cache
from typing import Any

import elsewhere
import pytest
import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node, Transformer, replace_pattern, symbolic_trace
from torch.fx.experimental.const_fold import split_const_subgraphs
from torch.fx.passes.shape_prop import ShapeProp
from torch.fx.passes.split_module import split_module

from fxopt_arith import ChangeTrueDivToMulByInverse
from fxopt_core import (
    FxoptError,
    ReversibleTransformation,
    UndoError,
    compose,
    faithful_copy,
    history,
    iter_nodes,
    tag_of,
    undo,
)
from fxopt_linear import FuseBiasInLinear, MergeLinears
from fxopt_testing import pictures
from fxopt_testing.forms import FunctionTracer, traced_by
from fxopt_testing.pictures import changes as difference

Picture = dict[str, Any]
PASSES: tuple[ReversibleTransformation, ...] = (MergeLinears(), ChangeTrueDivToMulByInverse(), FuseBiasInLinear())
X = torch.linspace(-1, 1, 12).view(3, 4)


class Model(nn.Module):
    """A group of three, a division by a constant, and two biases once the group is merged."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(4, 4), nn.Linear(4, 2), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.out, self.shift = nn.Linear(4, 4), nn.Parameter(torch.ones(4))
        self.offset: Tensor
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        y = self.norm(self.q(x) * self.k(x).sum() + self.v(x) / 3.0)
        return self.out(y) + self.shift + self.offset


def traced() -> GraphModule:
    """Calls of modules."""
    torch.manual_seed(0)
    return symbolic_trace(Model().eval())


def functional() -> GraphModule:
    """Calls of functions."""
    torch.manual_seed(0)
    return traced_by(FunctionTracer(), Model().eval())


@cache
def _exported() -> GraphModule:
    torch.manual_seed(0)
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    graph_module = torch.export.export(Model().eval(), (X,), dynamic_shapes=shapes, strict=False).module(
        check_guards=False
    )
    assert isinstance(graph_module, GraphModule)
    return graph_module


def exported() -> GraphModule:
    """An export graph."""
    return faithful_copy(_exported())


def picture(graph_module: GraphModule) -> Picture:
    """All that undo promises to bring back: beside what the kit compares, strides and what nodes say of themselves."""
    nodes, tensors = iter_nodes(graph_module.graph), graph_module.state_dict().items()
    keys = ("stack_trace", "nn_module_stack", "note")
    # Pickles and archives name classes.
    meta = [[re.sub(r"<class ('[\w.<>]+')>", r"\1", str(node.meta.get(key))) for key in keys] for node in nodes]
    found = {
        **pictures.picture(graph_module),
        "meta": meta,
        "strides": {name: tensor.stride() for name, tensor in tensors},
    }
    del found["module ``"]  # the root, whose hooks are lost when torch copies it
    return found


def saved(graph_module: GraphModule) -> GraphModule:
    """Saved and loaded by torch."""
    return elsewhere.loaded(elsewhere.saved(graph_module))


def eliminated(graph_module: GraphModule) -> GraphModule:
    """Dead code is gone."""
    graph_module.graph.eliminate_dead_code(lambda node: node.op != "get_attr")
    graph_module.recompile()
    return graph_module


def shapes_noted(graph_module: GraphModule) -> GraphModule:
    """torch has run it and noted shapes."""
    ShapeProp(graph_module).propagate(X)
    return graph_module


def pattern_missed(graph_module: GraphModule) -> GraphModule:
    """torch has replaced what is not there."""
    replace_pattern(graph_module, lambda x: torch.sigmoid(x), lambda x: torch.tanh(x))
    return graph_module


def tidied(graph_module: GraphModule) -> GraphModule:
    """Modules that nothing calls are gone."""
    graph_module.delete_all_unused_submodules()
    return graph_module


def with_the_ledger(made: GraphModule, graph_module: GraphModule) -> GraphModule:
    """A new graph module with the ledger of the old one, which torch leaves behind."""
    with pytest.raises(UndoError, match=r"no ledger that says how.*new.meta.update\(old.meta\)"):
        undo(made)
    made.meta.update(graph_module.meta)
    return made


def around_its_graph(graph_module: GraphModule) -> GraphModule:
    """A graph module made of the graph, by the constructor."""
    return with_the_ledger(GraphModule(graph_module, graph_module.graph), graph_module)


def of_copied_nodes(graph_module: GraphModule) -> GraphModule:
    """A graph module made of copies of all nodes."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in iter_nodes(graph_module.graph):
        copies[node] = graph.node_copy(node, lambda item: copies[item])
    graph.set_codegen(graph_module.graph._codegen)
    return with_the_ledger(GraphModule(graph_module, graph), graph_module)


def folded(graph_module: GraphModule) -> GraphModule:
    """What torch makes of it where there is nothing to fold."""
    return with_the_ledger(split_const_subgraphs(graph_module), graph_module)


def loaded_again(graph_module: GraphModule) -> GraphModule:
    """The tensors were loaded."""
    graph_module.load_state_dict({key: value.clone() for key, value in graph_module.state_dict().items()})
    return graph_module


def assigned(graph_module: GraphModule) -> GraphModule:
    """Other tensors were put in their place."""
    state = {key: value.clone() for key, value in graph_module.state_dict().items()}
    graph_module.load_state_dict(state, assign=True)
    return graph_module


PICKLED: list[Callable[[GraphModule], GraphModule]] = [
    saved, lambda gm: pickle.loads(pickle.dumps(gm)), lambda gm: saved(copy.deepcopy(saved(gm))),
]  # fmt: skip
WAYS: list[Callable[[GraphModule], GraphModule]] = [
    *PICKLED, copy.copy, copy.deepcopy, eliminated, shapes_noted, pattern_missed, tidied, around_its_graph,
    of_copied_nodes, loaded_again, assigned,
    lambda gm: gm.double().float(), lambda gm: gm.requires_grad_(False).requires_grad_(True), folded,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own copy of an export graph
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # torch's const_fold
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [traced, functional, exported])
def test_undo_is_exact_after_it(make: Callable[[], GraphModule], way: Callable[[GraphModule], GraphModule]) -> None:
    """Marks, origins and records are there, equal passes find them, and undo brings all back."""
    graph_module = make()
    before, expected = picture(graph_module), graph_module(X)
    assert compose(*PASSES)(graph_module, expect=4) is graph_module
    names = [[node.name for node in each.get_transformed_nodes(graph_module)] for each in PASSES]
    if make is exported and way in PICKLED:
        with pytest.raises(FxoptError, match=r"torch\.export\.save"):
            way(graph_module)
        return
    arrived = way(graph_module)
    assert [[node.name for node in each.get_transformed_nodes(arrived)] for each in PASSES] == names
    assert [len(record.rewrites) for record in history(arrived)] == [1, 1, 2]
    origins = [tag.origin for tag in map(tag_of, iter_nodes(arrived.graph)) if tag.origin is not None]
    assert {pass_name for pass_name, _ in origins} == {each.name for each in PASSES}
    undo(arrived)
    reordered = way in (copy.copy, around_its_graph, of_copied_nodes, folded)
    found = picture(arrived)
    assert difference(in_any_order(found) if reordered else found, in_any_order(before) if reordered else before) == []
    assert torch.equal(arrived(X), expected)


def in_any_order(found: Picture) -> Picture:
    """A picture without the order of modules: torch makes them in the order of the graph, and drops unused ones."""
    rest = {key: value for key, value in found.items() if not key.startswith(("module `", "order of modules"))}
    return {**rest, "keys of the state_dict": {*found["strides"]}}


def test_a_split_module_is_refused() -> None:
    """The nodes are in a module of their own then."""
    graph_module = MergeLinears()(traced())
    made: GraphModule = split_module(graph_module, None, lambda node: 0)  # type: ignore[arg-type]  # unused
    split = with_the_ledger(made, graph_module)
    before = picture(split)
    with pytest.raises(UndoError, match="module `q_k_v_merged` is gone"):
        undo(split)
    assert difference(picture(split), before) == []


def test_what_a_transformer_made_has_no_marks() -> None:
    """torch's Transformer drops all meta: there is nothing to undo, and passes start anew."""
    graph_module = Transformer(MergeLinears()(traced())).transform()
    assert history(graph_module) == ()
    assert not MergeLinears().get_transformed_nodes(graph_module)
    before = picture(graph_module)
    undo(graph_module)
    assert difference(picture(graph_module), before) == []


def test_numbers_of_nodes_from_elsewhere_are_not_taken_for_ones_own() -> None:
    """Passes on a graph module without a ledger count anew, and are undone by their own."""
    graph_module = MergeLinears()(traced())
    graph_module.meta["fxopt"] = None
    before, expected = picture(graph_module), graph_module(X)
    undo(ChangeTrueDivToMulByInverse()(graph_module, expect=1))
    assert difference(picture(graph_module), before) == []
    assert torch.equal(graph_module(X), expected)
