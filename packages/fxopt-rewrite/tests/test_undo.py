from __future__ import annotations

import copy
import gc
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from operator_swaps import Swap
from site_passes import PadLinear, nodes_of
from torch import Tensor, nn
from torch.fx import GraphModule, symbolic_trace

from fxopt_core import (
    UndoError,
    compose,
    history,
    iter_nodes,
    tag_of,
    undo,
)
from fxopt_rewrite import (
    infer_shapes,
)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(4, 4)
        self.drop = nn.Dropout(0.0)
        self.k = nn.Linear(4, 4, bias=False)
        self.v = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Any:
        return self.q(x) * self.drop(self.k(x)) + self.v(x)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.attention = Attention()
        self.norm = nn.LayerNorm(4)
        self.register_buffer("offset", torch.ones(4))

    def forward(self, x: Tensor) -> Any:
        return self.norm(self.attention(torch.relu(self.first(x)))) + self.offset


class Functional(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Parameter(torch.ones(4))
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.bias = nn.Parameter(torch.randn(4))
        self.after = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x * self.before, self.weight, bias=self.bias) * self.after


def traced_modules() -> GraphModule:
    torch.manual_seed(0)
    graph_module = symbolic_trace(Model().eval())
    for place, node in enumerate(iter_nodes(graph_module.graph)):
        node.meta["note"] = place
    return graph_module


def traced_functions() -> GraphModule:
    torch.manual_seed(0)
    return symbolic_trace(Functional().eval())


def exported() -> GraphModule:
    torch.manual_seed(0)
    graph_module = torch.export.export(Model().eval(), (torch.randn(2, 4),)).module(check_guards=False)
    assert isinstance(graph_module, GraphModule)
    return graph_module


FORMS = [traced_modules, traced_functions, exported]
forms = pytest.mark.parametrize("traced", FORMS)


def shape_of(graph_module: GraphModule) -> list[object]:
    """Return all that undoing brings back but for values, in plain data."""
    rows: list[object] = [
        (n.name, n.op, n.target, str(n.args), str(n.kwargs), {*map(str, n.users)}, [*map(str, n.all_input_nodes)])
        for n in iter_nodes(graph_module.graph)
    ]
    rows += [(n.meta.get("note"), str(n.meta.get("nn_module_stack"))) for n in iter_nodes(graph_module.graph)]
    for name, module in graph_module.named_modules():
        plain = {k: v for k, v in vars(module).items() if isinstance(v, int | float | str | tuple | list)}
        kind = type(module).__name__
        if module is graph_module:
            plain, kind = {}, ""
        rows.append((name, kind, module.training, plain, sorted(module._non_persistent_buffers_set)))
        tensors = (*module._parameters.items(), *module._buffers.items())
        rows.append([(k, t if t is None else (t.shape, t.stride(), t.requires_grad, type(t))) for k, t in tensors])
    return [*rows, list(graph_module.state_dict()), graph_module.code]


def values_of(graph_module: GraphModule) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in graph_module.state_dict().items()}


def assert_same_values(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert list(one) == list(other)
    for name, tensor in one.items():
        assert (tensor.dtype, torch.equal(tensor, other[name])) == (other[name].dtype, True), name


class TestRoundTrip:
    @forms
    def test_applied_again_after_it_the_code_is_the_same(self, traced: Callable[[], GraphModule]) -> None:
        graph_module = traced()
        names = graph_module.graph._graph_namespace
        taken = set(names._used_names)
        code = PadLinear()(graph_module).code
        for _ in range(2):
            undo(graph_module)
            assert names._used_names == taken
            assert PadLinear()(graph_module).code == code

    @forms
    def test_with_user_nodes_that_have_copied_meta(self, traced: Callable[[], GraphModule]) -> None:
        graph_module = traced()
        before, values = list(nodes_of(graph_module)), values_of(graph_module)
        PadLinear()(graph_module)
        (x,) = graph_module.graph.find_nodes(op="placeholder")
        for node in list(iter_nodes(graph_module.graph)):
            if node.op not in ("placeholder", "get_attr", "output"):
                with graph_module.graph.inserting_after(node):
                    graph_module.graph.call_function(torch.relu, (x,)).meta = dict(node.meta)
        undo(graph_module)
        assert [name for name in nodes_of(graph_module) if not name.startswith("relu")] == [
            name for name in before if not name.startswith("relu")
        ]
        assert_same_values(values_of(graph_module), values)

    def test_passes_on_one_layer_are_undone_one_by_one_with_their_marks(self) -> None:
        def seen() -> tuple[object, ...]:
            tags = {name: replace(tag_of(node), id=None) for name, node in nodes_of(graph_module).items()}
            return shape_of(graph_module), {name: tag for name, tag in tags.items() if tag.marks}

        graph_module = traced_modules()
        before = seen()
        PadLinear(rows=1, suffix="first")(graph_module)
        middle = seen()
        undo(PadLinear(suffix="padded")(graph_module, expect=1))
        assert seen() == middle
        undo(graph_module)
        assert seen() == before

    @forms
    @pytest.mark.parametrize("how", ["reverse", "undo"])
    def test_everything_is_as_before(self, traced: Callable[[], GraphModule], how: str) -> None:
        graph_module, x = traced(), torch.randn(2, 4)
        before, values, expected = shape_of(graph_module), values_of(graph_module), graph_module(x)
        PadLinear()(graph_module)
        assert history(graph_module)[0].rewrites
        assert torch.allclose(graph_module(x), expected, atol=1e-6)
        assert shape_of(graph_module) != before
        if how == "undo":
            assert undo(graph_module) is graph_module
        else:
            PadLinear()(graph_module, reverse=True)
        assert shape_of(graph_module) == before
        assert_same_values(values_of(graph_module), values)
        assert torch.equal(graph_module(x), expected)
        assert not any("fxopt" in node.meta for node in iter_nodes(graph_module.graph))
        assert [record.state for record in history(graph_module)] == ["undone"]

    def test_composition(self) -> None:
        graph_module = traced_modules()
        before = shape_of(graph_module)
        passes = compose(PadLinear(suffix="q"), compose(PadLinear(suffix="v"), PadLinear(rows=1, suffix="padded")))
        for back in (undo, lambda gm: passes(gm, reverse=True)):
            passes(graph_module, expect=4)
            assert {record.run for record in history(graph_module)[-3:]} == {history(graph_module)[-1].run}
            back(graph_module)
            assert shape_of(graph_module) == before

    @pytest.mark.parametrize("traced", [exported, lambda: infer_shapes(traced_functions(), torch.randn(2, 4))])
    def test_parameters_are_described_again(self, traced: Callable[[], GraphModule]) -> None:
        graph_module = traced()

        def described() -> list[object]:
            values = [(node.name, node.meta.get("val")) for node in iter_nodes(graph_module.graph)]
            return [
                (name, type(v), v.shape, v.stride(), v.dtype, v.device) if isinstance(v, Tensor) else name
                for name, v in values
                if name != "output"
            ]

        before = described()
        undo(PadLinear()(graph_module))
        assert described() == before

    def test_lists_among_attributes_are_lists_again(self) -> None:
        model: Any = Model().eval()
        model.first.sizes = [1, (2, 3)]
        graph_module: Any = symbolic_trace(model)
        undo(PadLinear()(graph_module))
        assert graph_module.first.sizes == [1, (2, 3)]
        assert graph_module.first is not model.first

    @pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")  # of torch, in a deep copy of an export graph
    @pytest.mark.parametrize("copied", [lambda graph_module: graph_module, copy.deepcopy])
    def test_containers_that_became_empty_were_removed(self, copied: Callable[[GraphModule], GraphModule]) -> None:
        """In export graphs, plain modules hold the parameters."""
        graph_module = exported()
        before = [*graph_module.state_dict()], [name for name, _ in graph_module.named_modules()]
        PadLinear()(graph_module)
        assert "attention.q" not in dict(graph_module.named_modules())
        (*_, record) = history(graph_module)
        assert "attention.q" not in {name for site in record.rewrites for name in site.modules_before}
        graph_module = undo(copied(graph_module))
        assert ([*graph_module.state_dict()], [name for name, _ in graph_module.named_modules()]) == before

    def test_without_lint_the_code_is_left_alone(self) -> None:
        graph_module = PadLinear()(traced_modules())
        code = graph_module.code
        undo(graph_module, lint_and_recompile=False)
        assert graph_module.code == code


class TestCurrentValues:
    def test_orders_of_dimensions_come_back_without_gaps(self) -> None:
        graph_module = traced_modules()
        layer: Any = graph_module.get_submodule("attention.q")
        layer.weight = nn.Parameter(torch.randn(4, 8).t()[::2])
        before = {name: (value.clone(), value.stride()) for name, value in graph_module.state_dict().items()}
        assert before["attention.q.weight"][1] == (2, 8)
        before["attention.q.weight"] = before["attention.q.weight"][0], (1, 4)
        PadLinear()(graph_module)
        undo(graph_module)
        for name, value in graph_module.state_dict().items():
            assert torch.equal(value, before[name][0])
            assert value.stride() == before[name][1], name

    def test_on_the_meta_device(self) -> None:
        graph_module: Any = undo(PadLinear()(traced_modules().to("meta")))
        assert graph_module.first.weight.is_meta
        moved: Any = undo(PadLinear()(traced_modules()).to("meta"))
        assert moved.first.weight.is_meta

    @pytest.mark.parametrize("frozen", [True, False])
    @pytest.mark.parametrize("training", [True, False])
    def test_flags_are_those_of_now(self, frozen: bool, training: bool) -> None:
        graph_module: Any = PadLinear()(traced_modules())
        graph_module.requires_grad_(not frozen).train(training)
        undo(graph_module)
        assert {p.requires_grad for p in graph_module.attention.parameters()} == {not frozen}
        assert {m.training for m in graph_module.attention.modules()} == {training}
        assert all(p.is_leaf and p.grad is None for p in graph_module.parameters())

    def test_new_parameters_share_no_memory(self) -> None:
        graph_module: Any = PadLinear(suffix="q")(traced_modules())
        padded = graph_module.attention.q_padded
        undo(graph_module)
        with torch.no_grad():
            padded.weight.fill_(0)
        assert graph_module.attention.q.weight.abs().sum() > 0


def change_argument(graph_module: GraphModule) -> None:
    node = nodes_of(graph_module)["narrow"]
    node.args = (node.args[0], -1, 1, 3)


def remove_node(graph_module: GraphModule) -> None:
    node = nodes_of(graph_module)["narrow"]
    node.replace_all_uses_with(nodes_of(graph_module)["x"])
    graph_module.graph.erase_node(node)


def read_new_node(graph_module: GraphModule) -> None:
    wide = nodes_of(graph_module)["first_padded"]
    with graph_module.graph.inserting_after(wide):
        graph_module.graph.call_function(torch.relu, (wide,))


def copy_node_with_meta(graph_module: GraphModule) -> None:
    wide = nodes_of(graph_module)["x"]
    with graph_module.graph.inserting_after(wide):
        twin = graph_module.graph.call_function(torch.relu, (wide,))
    twin.meta = dict(wide.meta)
    wide._rename("renamed")


def take_name(graph_module: GraphModule) -> None:
    graph = graph_module.graph
    graph._graph_namespace._used_names.discard("first")
    with graph.inserting_after(nodes_of(graph_module)["x"]):
        graph.create_node("call_function", torch.relu, (nodes_of(graph_module)["x"],), name="first")


def call_module_again(graph_module: GraphModule) -> None:
    with graph_module.graph.inserting_after(nodes_of(graph_module)["x"]):
        graph_module.graph.call_module("first_padded", (nodes_of(graph_module)["x"],))


def read_parameter(graph_module: GraphModule) -> None:
    with graph_module.graph.inserting_after(nodes_of(graph_module)["x"]):
        graph_module.graph.get_attr("first_padded.weight")


def tie_parameter(graph_module: Any) -> None:
    graph_module.other = nn.Linear(4, 6)
    graph_module.other.weight = graph_module.first_padded.weight


def train_stand_in(graph_module: Any) -> None:
    with torch.no_grad():
        graph_module.first_padded.bias[-1] = 1e-30


def build_on_it(graph_module: GraphModule) -> None:
    PadLinear(rows=1, suffix="first_padded")(graph_module, expect=1)


# What is done to a graph module in which `first` became `first_padded`, and how undoing it is refused.
CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "another argument": (change_argument, "node `narrow`, which the pass made, was changed since"),
    "a node is gone": (
        remove_node,
        "which the pass made, was removed or replaced since|nodes for its replacement, expected exactly one",
    ),
    "a new node is read": (
        read_new_node,
        "node `first_padded`, which the original does not have, is read by `relu_1` now",
    ),
    "a copy of meta": (copy_node_with_meta, "the graph has 2 nodes for an input of `first`, expected exactly one"),
    "a name is taken": (take_name, "another node is called `first` now"),
    "a module is called": (
        call_module_again,
        "module `first_padded`, which the original does not have, is used by `first_padded_1` now",
    ),
    "a parameter is read": (
        read_parameter,
        "module `first_padded`, which the original does not have, is used by `first_padded_weight` now",
    ),
    "a module is gone": (lambda gm: delattr(gm, "first_padded"), "module `first_padded` is gone"),
    "another size": (
        lambda gm: setattr(gm, "first_padded", nn.Linear(4, 8)),
        r"`first_padded.weight` holds|shapes now|they are no longer 0.0",
    ),
    "no bias": (
        lambda gm: setattr(gm.first_padded, "bias", None),
        "`first_padded.bias`, which holds the values of `first.bias`, is gone",
    ),
    "a hook": (
        lambda gm: gm.first_padded.register_forward_hook(print),
        r"module `first_padded`, which the pass made, has hooks \(_forward_hooks\)",
    ),
    "a parametrization": (
        lambda gm: torch.nn.utils.parametrizations.weight_norm(gm.first_padded),
        "gone|is parametrized",
    ),
    "a second name": (lambda gm: setattr(gm, "alias", gm.first_padded), "or a tensor of it has a second name now"),
    "a tie": (tie_parameter, "or a tensor of it has a second name now"),
    "trained stand-ins": (
        train_stand_in,
        r"`first_padded.bias` holds stand-in values.* no longer 0.0: they were trained or loaded",
    ),
    "a module in its place": (lambda gm: setattr(gm, "first", nn.ReLU()), "there is another `first` now"),
    "a later pass": (build_on_it, "pass `pad-linear` ran after it and builds on its result.*undo `pad-linear` first"),
}


class TestRefusals:
    @pytest.mark.parametrize(("change", "found"), CHANGES.values(), ids=CHANGES)
    def test_say_why_and_change_nothing(self, change: Callable[[GraphModule], None], found: str) -> None:
        graph_module = PadLinear()(traced_modules())
        change(graph_module)
        before, identities = shape_of(graph_module), identities_of(graph_module)
        ways: list[Callable[[], object]] = [
            lambda: PadLinear()(graph_module, reverse=True),
            lambda: PadLinear().reverse(graph_module),
            lambda: undo(graph_module),
        ]
        for way in ways[: 2 if change is build_on_it else 3]:  # undo takes the later pass back
            with pytest.raises(UndoError, match=found) as caught:
                way()
            assert "Nothing was changed" in str(caught.value)
            assert caught.value.pass_name == "pad-linear"
            assert shape_of(graph_module) == before
            assert identities_of(graph_module) == identities

    def test_in_a_composition_bring_back_what_was_undone_already(self) -> None:
        passes = compose(PadLinear(suffix="first"), Swap(), PadLinear(suffix="q"))
        graph_module = passes(traced_modules())
        train_stand_in(graph_module)
        before, identities = shape_of(graph_module), identities_of(graph_module)
        with pytest.raises(UndoError) as caught:
            passes(graph_module, reverse=True)
        assert caught.value.index == 0
        assert shape_of(graph_module) == before
        assert identities_of(graph_module) == identities

    def test_a_value_that_would_be_read_too_early(self) -> None:
        """The original stood late; what stands for it is at the front, and is read there."""
        graph_module = symbolic_trace(Attention().eval())
        PadLinear(suffix="v", early=True)(graph_module, expect=1)
        nodes = nodes_of(graph_module)
        with graph_module.graph.inserting_after(nodes["narrow"]):
            early = graph_module.graph.call_function(torch.relu, (nodes["narrow"],))
        nodes["q"].args = (early,)
        for lint in (True, False):
            with pytest.raises(UndoError, match="node `relu` would read `v` before it is computed"):
                undo(graph_module, lint_and_recompile=lint)

    def test_passes_that_a_record_cannot_make_again(self) -> None:
        def swapped() -> GraphModule:
            class Local(Swap):
                pass

            return Local()(traced_modules())

        graph_module = swapped()
        gc.collect()  # takes the class away
        with pytest.raises(UndoError, match=r"no equal pass can be made.*or reverse it by the pass itself"):
            undo(graph_module)

    def test_classes_that_are_gone(self, monkeypatch: pytest.MonkeyPatch) -> None:
        graph_module = PadLinear()(traced_modules())
        monkeypatch.delattr("torch.nn.modules.linear.Linear")
        with pytest.raises(UndoError, match=r"the class torch.nn.modules.linear:Linear of module .* cannot be found"):
            undo(graph_module, lint_and_recompile=False)


def identities_of(graph_module: GraphModule) -> list[object]:
    rows: list[object] = [node.name for node in iter_nodes(graph_module.graph)]
    rows += [(name, id(module)) for name, module in graph_module.named_modules()]
    rows += [(name, id(t)) for name, t in (*graph_module.named_parameters(), *graph_module.named_buffers())]
    return [*rows, history(graph_module), [tag_of(node) for node in iter_nodes(graph_module.graph)]]


class TestOthers:
    def test_dead_code_elimination_and_renaming_in_between(self) -> None:
        graph_module = PadLinear()(traced_modules())
        before = shape_of(traced_modules())
        graph_module.graph.eliminate_dead_code()
        nodes_of(graph_module)["first_padded"]._rename("any_name")
        assert shape_of(undo(graph_module)) == before

    def test_new_readers_of_the_result_read_the_original(self) -> None:
        graph_module = PadLinear()(traced_modules())
        result = nodes_of(graph_module)["narrow"]
        with graph_module.graph.inserting_after(nodes_of(graph_module)["relu"]):
            reader = graph_module.graph.call_function(torch.tanh, (result,))
        undo(graph_module)
        assert reader.args == (nodes_of(graph_module)["first"],)

    def test_copied_meta_of_new_nodes_confuses_nobody(self) -> None:
        graph_module = PadLinear()(traced_modules())
        result = nodes_of(graph_module)["narrow"]
        with graph_module.graph.inserting_after(result):
            twin = graph_module.graph.call_function(torch.tanh, (result,))
        twin.meta = dict(result.meta)
        undo(graph_module)
        assert twin.args == (nodes_of(graph_module)["first"],)
