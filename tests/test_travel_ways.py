"""What was done survives what others do to the graph module; where it cannot, undo says why and changes nothing."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from graph_picture import Picture, difference, picture
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
    history,
    iter_nodes,
    undo,
)
from fxopt_linear import FuseBiasInLinear, MergeLinears
from fxopt_rewrite import provenance

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

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.q(x) * self.k(x).sum() + self.v(x) / 3.0)
        z: Tensor = self.out(y) + self.shift + self.offset
        return z


class Functional(Model):
    """The same by functions."""

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (F.linear(x, m.weight, m.bias) for m in (self.q, self.k, self.v))
        return F.linear(self.norm(q * k.sum() + v / 3.0), self.out.weight, self.out.bias) + self.shift + self.offset


def traced() -> GraphModule:
    """Calls of modules."""
    torch.manual_seed(0)
    return symbolic_trace(Model().eval())


def functional() -> GraphModule:
    """Calls of functions."""
    torch.manual_seed(0)
    return symbolic_trace(Functional().eval())


def exported() -> GraphModule:
    """An export graph."""
    torch.manual_seed(0)
    shapes = ({0: torch.export.Dim.DYNAMIC},)
    graph_module = torch.export.export(Model().eval(), (X,), dynamic_shapes=shapes, strict=False).module(
        check_guards=False
    )
    assert isinstance(graph_module, GraphModule)
    return graph_module


FORMS = [traced, functional, exported]
forms = pytest.mark.parametrize("make", FORMS)


def saved(graph_module: GraphModule) -> GraphModule:
    """Saved and loaded by torch."""
    file = io.BytesIO()
    torch.save(graph_module, file)
    file.seek(0)
    loaded: GraphModule = torch.load(file, weights_only=False)
    return loaded


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


def around_its_graph(graph_module: GraphModule) -> GraphModule:
    """A graph module made of the graph, by the constructor."""
    return GraphModule(graph_module, graph_module.graph)


def of_copied_nodes(graph_module: GraphModule) -> GraphModule:
    """A graph module made of copies of all nodes."""
    graph = Graph()
    copies: dict[Node, Node] = {}
    for node in iter_nodes(graph_module.graph):
        copies[node] = graph.node_copy(node, lambda item: copies[item])
    graph.set_codegen(graph_module.graph._codegen)
    return GraphModule(graph_module, graph)


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
    lambda gm: gm.double().float(), lambda gm: gm.requires_grad_(False).requires_grad_(True), split_const_subgraphs,
]  # fmt: skip


@pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # torch's own copy of an export graph
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")  # torch's const_fold
@pytest.mark.parametrize("way", WAYS)
@forms
def test_undo_is_exact_after_it(make: Callable[[], GraphModule], way: Callable[[GraphModule], GraphModule]) -> None:
    """Marks, provenance and records are there, equal passes find them, and undo brings all back."""
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
    made = [found for found in map(provenance, iter_nodes(arrived.graph)) if found]
    assert {found.pass_name for found in made} == {each.name for each in PASSES}
    undo(arrived)
    reordered = way in (copy.copy, around_its_graph, of_copied_nodes, split_const_subgraphs)
    found = picture(arrived)
    assert difference(in_any_order(found) if reordered else found, in_any_order(before) if reordered else before) == []
    assert torch.equal(arrived(X), expected)


def in_any_order(found: Picture) -> Picture:
    """A picture without the order of modules: torch makes them in the order of the graph, and drops unused ones."""
    rest = {key: value for key, value in found.items() if key not in ("modules", "keys")}
    return {**rest, "ties": dict(sorted(found["ties"].items())), "keys": sorted(found["keys"])}


@forms
def test_undo_after_nodes_were_renamed(make: Callable[[], GraphModule]) -> None:
    """What was taken out comes back under its own name; what stayed keeps its new one."""
    graph_module = make()
    before, expected = [node.name for node in iter_nodes(graph_module.graph)], graph_module(X)
    compose(*PASSES)(graph_module)
    kept = {node.name for node in iter_nodes(graph_module.graph) if node.name in before}
    for node in list(iter_nodes(graph_module.graph)):
        if node.op not in ("placeholder", "output"):
            node._rename(f"renamed_{node.name}")
    undo(graph_module)
    fixed = {node.name for node in iter_nodes(graph_module.graph) if node.op in ("placeholder", "output")}
    wanted = [f"renamed_{name}" if name in kept and name not in fixed else name for name in before]
    assert [node.name for node in iter_nodes(graph_module.graph)] == wanted
    assert torch.equal(graph_module(X), expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
@forms
def test_undo_after_a_change_of_dtype(make: Callable[[], GraphModule], dtype: torch.dtype) -> None:
    """The values are those of now."""
    graph_module = make()
    before = {name: value.to(dtype) for name, value in graph_module.state_dict().items()}
    compose(*PASSES)(graph_module).to(dtype)
    if make is not exported:  # which does not pickle
        undo(saved(graph_module))
    undo(graph_module)
    after = graph_module.state_dict()
    assert list(after) == list(before)
    assert all(after[name].dtype == dtype and torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("make", [traced, functional])
def test_undo_after_training_in_train_mode(make: Callable[[], GraphModule]) -> None:
    """The trained values come back under the old keys, and what they compute is what was trained."""
    graph_module = compose(MergeLinears(), ChangeTrueDivToMulByInverse())(make().train())
    keys = list(make().state_dict())
    optimizer = torch.optim.Adam(graph_module.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        graph_module(X).sum().backward()
        optimizer.step()
    trained = saved(graph_module.eval())
    expected = graph_module(X)
    undo(trained)
    assert list(trained.state_dict()) == keys
    assert not torch.equal(trained.get_parameter("q.weight"), make().get_parameter("q.weight"))
    torch.testing.assert_close(trained(X), expected, rtol=1e-5, atol=1e-5)
    assert not trained.training


def delete_module(graph_module: Any) -> None:
    """The merged module is gone."""
    delattr(graph_module, "q_k_v_merged")


def rename_module(graph_module: Any) -> None:
    """And stands under another name."""
    graph_module.another = graph_module.q_k_v_merged
    delattr(graph_module, "q_k_v_merged")


def swap_shape(graph_module: Any) -> None:
    """The weight has another shape."""
    graph_module.q_k_v_merged.weight = nn.Parameter(torch.zeros(9, 4))


def swap_class(graph_module: Any) -> None:
    """It is another kind of module."""
    graph_module.q_k_v_merged = nn.Bilinear(4, 4, 10)


def erase_node(graph_module: GraphModule) -> None:
    """A slice of the product is taken from elsewhere."""
    (node, *_) = (node for node in iter_nodes(graph_module.graph) if node.target is torch.narrow)
    node.replace_all_uses_with(node.prev)
    graph_module.graph.erase_node(node)


def change_arguments(graph_module: GraphModule) -> None:
    """The slice is another one."""
    (node, *_) = (node for node in iter_nodes(graph_module.graph) if node.target is torch.narrow)
    node.args = (*node.args[:2], 1, 3)


def take_the_name(graph_module: Any) -> None:
    """Something stands where `k` has to come back."""
    graph_module.k = nn.ReLU()


def add_alias(graph_module: Any) -> None:
    """The merged module has a second name."""
    graph_module.alias = graph_module.q_k_v_merged


def add_reader(graph_module: GraphModule) -> None:
    """Something reads the whole product."""
    (node,) = (node for node in iter_nodes(graph_module.graph) if node.target == "q_k_v_merged")
    with graph_module.graph.inserting_after(node):
        graph_module.graph.call_function(torch.relu, (node,))


EDITS: dict[Callable[[GraphModule], None], str] = {
    delete_module: "module `q_k_v_merged` is gone|`q_k_v_merged`",
    rename_module: "`q_k_v_merged`",
    swap_shape: "`q_k_v_merged.weight`",
    swap_class: "`q_k_v_merged",
    erase_node: "taken out or replaced since|0 nodes",
    change_arguments: "node `narrow`, which the pass made, was changed since",
    take_the_name: "there is another `k` now",
    add_alias: "second name",
    add_reader: "`q_k_v_merged`, which the original does not have, is read by `relu`",
}


@pytest.mark.parametrize("edit", EDITS)
@pytest.mark.parametrize("how", ["undo", "reverse"])
def test_a_loaded_module_that_was_edited_by_hand_is_refused(edit: Callable[[GraphModule], None], how: str) -> None:
    """What was found is named, and nothing is changed."""
    loaded = saved(MergeLinears()(traced()))
    edit(loaded)
    records = history(loaded)
    before = picture(loaded)
    with pytest.raises(UndoError, match=EDITS[edit]) as raised:
        undo(loaded) if how == "undo" else MergeLinears()(loaded, reverse=True)
    assert "Nothing was changed" in str(raised.value)
    assert difference(picture(loaded), before) == []
    assert history(loaded) == records


def test_a_split_module_is_refused() -> None:
    """The nodes are in a module of their own then."""
    split: GraphModule = split_module(MergeLinears()(traced()), None, lambda node: 0)  # type: ignore[arg-type]  # unused
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


def test_a_graph_module_that_lost_its_ledger_is_refused() -> None:
    """Nodes say that they were rewritten, and nothing says how."""
    graph_module = saved(MergeLinears()(traced()))
    graph_module.meta["fxopt"] = None
    before = picture(graph_module)
    for how in (undo, lambda gm: MergeLinears()(gm, reverse=True)):
        with pytest.raises(FxoptError, match=r"no ledger that says how.*new.meta.update\(old.meta\)"):
            how(graph_module)
        assert difference(picture(graph_module), before) == []


def test_numbers_of_nodes_from_elsewhere_are_not_taken_for_ones_own() -> None:
    """Passes on a graph module without a ledger count anew, and are undone by their own."""
    graph_module = MergeLinears()(traced())
    graph_module.meta["fxopt"] = None
    before, expected = picture(graph_module), graph_module(X)
    undo(ChangeTrueDivToMulByInverse()(graph_module, expect=1))
    assert difference(picture(graph_module), before) == []
    assert torch.equal(graph_module(X), expected)


ORDERS = [(0, 1, 2), (0, 2, 1), (1, 0, 2), (1, 2, 0), (2, 0, 1), (2, 1, 0)]


@pytest.mark.parametrize("order", ORDERS)
@forms
def test_out_of_order_it_is_right_or_refused(make: Callable[[], GraphModule], order: tuple[int, ...]) -> None:
    """Reversing passes by themselves in any order, and then the rest, ends where it began or changes nothing."""
    graph_module = make()
    start = picture(graph_module)
    for each in PASSES:
        each(graph_module)
    for place in order:
        before = picture(graph_module)
        try:
            PASSES[place](graph_module, reverse=True)
        except UndoError as error:
            assert "Nothing was changed" in str(error)
            assert difference(picture(graph_module), before) == []
    while any(record.state == "applied" and record.changed for record in history(graph_module)):
        undo(graph_module)
    assert difference(picture(graph_module), start) == []
