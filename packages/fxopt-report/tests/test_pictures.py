"""Pictures: what is gone, new and changed; the graph before from the ledger alone; the drawing."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from reporting_models import HOSTILE, Small, hostile, layers, traced
from torch import nn
from torch.fx import GraphModule, Node

from fxopt_capture.archive.files import load, save
from fxopt_capture.capture import capture
from fxopt_core import Transformation, compose, history, iter_nodes, registry, undo
from fxopt_core.errors import PreconditionError
from fxopt_linear.fuse_bias import FuseBiasInLinear
from fxopt_linear.merge_linears import MergeLinears
from fxopt_norm.convolutions import FuseBatchNorm2dInConv2d
from fxopt_report.drawn import DrawnGraph
from fxopt_report.pictures import picture

PASSES = compose(FuseBatchNorm2dInConv2d(), MergeLinears(), FuseBiasInLinear())


class SwapAddAndMul(Transformation):
    """``x * y`` -> ``x + y``, by editing the graph itself."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        for node in iter_nodes(graph_module.graph):
            if node.target is torch.Tensor.mul or node.target == "mul" or "mul" in str(node.target):
                node.target = torch.add
                node.op = "call_function"
        return graph_module


def same_graph(one: DrawnGraph | None, other: DrawnGraph | None) -> bool:
    """Whether two graphs have the same nodes, with the same inputs, that do the same."""
    assert one is not None
    assert other is not None
    left, right = ([(*n.identity, n.arguments, n.inputs) for n in g.nodes.values()] for g in (one, other))
    return left == right


@pytest.fixture
def small() -> tuple[GraphModule, GraphModule]:
    """A graph module, and what passes made of it."""
    graph_module = traced(Small())
    return graph_module, compose(PASSES, inplace=False)(graph_module)


def test_what_is_gone_new_and_kept_is_told(small: tuple[GraphModule, GraphModule]) -> None:
    seen = picture(small[1], small[0])
    changes = seen.changes
    assert {name for name, status in changes.before.items() if status == "removed"} == {"conv", "norm", "q", "k"}
    added = {name for name, status in changes.after.items() if status == "added"}
    assert {"conv_folded", "narrow", "narrow_1"} <= added
    assert all(status != "changed" for status in changes.after.values())
    assert seen.changes.refused == {"v"}


def test_changed_nodes_are_linked_both_ways(small: tuple[GraphModule, GraphModule]) -> None:
    seen = picture(small[1], small[0])
    changes = seen.changes
    assert set(changes.sources["conv_folded"]) == {"conv", "norm"}
    assert set(changes.results["conv"]) == {"conv_folded"}
    for name, sources in changes.sources.items():
        assert sources, name
        assert all(name in changes.results[source] for source in sources)
    gone = {name for name, status in changes.before.items() if status == "removed"}
    assert gone <= changes.results.keys()


def test_sites_are_those_of_the_records(small: tuple[GraphModule, GraphModule]) -> None:
    seen = picture(small[1], small[0])
    assert [site.site for site in seen.rewritten][:2] == ["conv + norm", "q + k"]
    first = seen.rewritten[0]
    assert set(first.before) == {"conv", "norm"}
    assert first.after == ("conv_folded",)
    (refused,) = [site for site in seen.refused if site.record.pass_name == "merge-linears"]
    assert (refused.reason, refused.after) == ("hooks", ("v",))


@pytest.mark.parametrize("pipeline", [PASSES, FuseBatchNorm2dInConv2d(), MergeLinears(), compose(MergeLinears())])
def test_the_graph_before_comes_from_the_ledger_alone(pipeline: Transformation) -> None:
    """Also where a pass cannot be undone."""
    graph_module = traced(Small(hook=False))
    expected = DrawnGraph.of(graph_module)
    pipeline(graph_module)
    seen = picture(graph_module)
    assert not seen.notes
    assert same_graph(seen.before, expected)
    loaded = pickle.loads(pickle.dumps(graph_module))
    assert same_graph(picture(loaded).before, expected)
    assert same_graph(picture(copy.deepcopy(graph_module)).before, expected)


def test_a_picture_changes_nothing(small: tuple[GraphModule, GraphModule]) -> None:
    code = small[1].graph.python_code("self").src
    picture(small[1])
    picture(small[1], small[0])
    assert small[1].graph.python_code("self").src == code
    graph_module = traced(Small())
    MergeLinears()(graph_module)
    picture(graph_module)
    undo(graph_module)


def test_what_a_pass_of_ones_own_did_is_told_as_far_as_it_is_known() -> None:
    graph_module = layers(30)
    original = copy.deepcopy(graph_module)
    compose(SwapAddAndMul(), MergeLinears())(graph_module)
    seen = picture(graph_module)
    assert "swap-add-and-mul" in seen.notes[0]
    assert seen.before is not None
    assert any(node.target == "torch.add" for node in seen.before.nodes.values())
    full = picture(graph_module, original)
    assert not full.notes
    changed = {name for name, status in full.changes.after.items() if status == "changed"}
    assert changed


def test_only_the_graph_after_is_drawn_where_nothing_tells_of_the_other() -> None:
    graph_module = layers(30)
    compose(MergeLinears(), SwapAddAndMul())(graph_module)
    seen = picture(graph_module)
    assert seen.before is None
    assert len(seen.notes) == 1
    assert seen.to_svg(None)
    assert "blocks_0_q_k_v_merged" in seen.order
    assert repr(seen).startswith("<picture of unknown nodes before")


def narrowed(graph_module: GraphModule) -> Node:
    """The first slice of a merged layer."""
    return next(node for node in iter_nodes(graph_module.graph) if node.name == "narrow")


def test_what_others_put_in_since_is_in_both_graphs(small: tuple[GraphModule, GraphModule]) -> None:
    node = narrowed(small[1])
    with small[1].graph.inserting_after(node):
        extra = small[1].graph.call_function(torch.relu, (node,))
    node.replace_all_uses_with(extra, delete_user_cb=lambda user: user is not extra)
    seen = picture(small[1])
    assert not seen.notes
    assert seen.before is not None
    assert seen.before.nodes[extra.name].inputs == ("q",)
    assert seen.status(extra.name) == "kept"


def test_a_graph_that_does_not_fit_its_ledger_is_drawn_alone(small: tuple[GraphModule, GraphModule]) -> None:
    node = narrowed(small[1])
    with small[1].graph.inserting_after(node):
        extra = small[1].graph.call_function(torch.relu, node.args[:1])
    node.replace_all_uses_with(extra)
    small[1].graph.erase_node(node)
    seen = picture(small[1])
    assert "give the original graph module" in seen.notes[0]
    assert seen.before is not None, "the last pass can be taken back"
    assert seen.rewritten


def test_undone_passes_leave_no_change() -> None:
    graph_module = traced(Small(hook=False))
    MergeLinears()(graph_module)
    undo(graph_module)
    seen = picture(graph_module)
    assert seen._repr_html_() == "<p>nothing changed</p>"
    assert not seen.rewritten
    assert seen.near(1) == ()


def test_the_changed_neighbourhood_is_near(small: tuple[GraphModule, GraphModule]) -> None:
    seen = picture(small[1])
    assert {"conv", "conv_folded", "v"} <= {*seen.near(0)}
    assert "x" not in seen.near(0)
    assert {"x", "relu", "mean", "cat"} <= {*seen.near(1)} - {*seen.near(0)}
    assert seen.near(None) == seen.order


def test_a_picture_needs_a_graph() -> None:
    with pytest.raises(PreconditionError, match=r"torch\.fx\.GraphModule"):
        picture(Small())  # type: ignore[arg-type]  # what a caller may get wrong


def test_hostile_names_stay_text() -> None:
    graph_module = hostile()
    MergeLinears()(graph_module)
    seen = picture(graph_module)
    drawing = ElementTree.fromstring(seen.to_svg(None))
    assert {element.tag.rpartition("}")[2] for element in drawing.iter()} <= {
        "svg", "rect", "g", "title", "text", "path", "polygon",
    }  # fmt: skip
    assert all(not key.startswith("on") for element in drawing.iter() for key in element.attrib)
    assert all(text in " ".join(node.target for node in seen.after.nodes.values()) for text in HOSTILE[:1])


def test_the_drawing_has_every_node_once(small: tuple[GraphModule, GraphModule]) -> None:
    seen = picture(small[1])
    drawing = ElementTree.fromstring(seen.to_svg(None))
    groups = [g.get("class") for g in drawing.iter("{http://www.w3.org/2000/svg}g")]
    assert len(groups) == len(seen.order)
    assert groups.count("removed") == 4
    assert groups.count("refused") == 1


def test_notebooks_show_a_drawing_or_a_line(small: tuple[GraphModule, GraphModule]) -> None:
    assert "<svg" in picture(small[1])._repr_html_()
    large = layers(600)
    MergeLinears()(large)
    assert "nodes to draw: write a report" in picture(large)._repr_html_()
    assert picture(traced(nn.Sequential()))._repr_html_() == "<p>nothing changed</p>"


def test_plans_of_regions_leave_the_graph_as_it_is(tmp_path: Path) -> None:
    """Their pass has no journal, as it changes nothing but generated code."""
    for name in ("fxopt_cpu", "fxopt_simplify"):
        pytest.importorskip(name)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Conv2d(4, 4, 1)).eval()
    captured = capture(model, torch.randn(2, 3, 8, 8))
    before = DrawnGraph.of(captured)
    save(registry().pipeline("cpu-inference")(captured), tmp_path / "fast.fxopt")
    for graph_module in (captured, load(tmp_path / "fast.fxopt")):
        changed = {record.pass_name for record in history(graph_module) if record.changed}
        assert "plan-regions" in changed
        drawn = picture(graph_module)
        assert drawn.notes == ()
        assert same_graph(drawn.before, before)
