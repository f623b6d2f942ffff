"""Every node that a shipped pass makes says where it came from, on every form; the model's own lines of source stay."""

from __future__ import annotations

import pickle
from collections.abc import Iterator

import pytest
from test_same_sites import EXPECTED, FORMS, made as graph_of
from torch.fx import GraphModule, Node

from fxopt_arith import ChangeTrueDivToMulByInverse
from fxopt_core import Transformation, history, iter_nodes
from fxopt_rewrite import Provenance, provenance
from fxopt_testing.forms import Form

# torch warns about itself when the pytree of an export graph is copied.
pytestmark = pytest.mark.filterwarnings("ignore:.*LeafSpec:FutureWarning")
ALL: list[type[Transformation]] = [*EXPECTED, ChangeTrueDivToMulByInverse]


def with_traces(form: Form) -> GraphModule:
    """A graph module each of whose nodes has a line of source: torch's own, or one that names the node."""
    graph_module = graph_of(form)
    for node in iter_nodes(graph_module.graph):
        node.meta.setdefault("stack_trace", f"a line of {node.name}")
    return graph_module


def made(graph_module: GraphModule) -> Iterator[tuple[Node, Provenance]]:
    """The nodes that passes made."""
    for node in iter_nodes(graph_module.graph):
        found = provenance(node)
        if found is not None:
            yield node, found


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cls", ALL)
def test_new_nodes_say_where_they_came_from(cls: type[Transformation], form: Form) -> None:
    """Pass, nodes, modules, trace, module stack and torch's own chain of sources; after pickling, too."""
    graph_module = with_traces(form)
    before = {node.name: dict(node.meta) for node in iter_nodes(graph_module.graph)}
    transformation = cls()
    transformation(graph_module)
    new = [node for node in iter_nodes(graph_module.graph) if node.name not in before]
    found = dict(made(graph_module))
    assert set(found) == set(new)
    taken_out = {name for rewrite in history(graph_module)[-1].rewrites for name in rewrite.modules_before}
    for node, origin in found.items():
        assert (origin.pass_name, origin.signature) == (transformation.name, transformation.signature)
        assert set(origin.nodes) <= before.keys()
        assert set(origin.modules) <= taken_out
        sources = [before[name] for name in origin.nodes]
        assert node.meta["stack_trace"] == sources[0]["stack_trace"]
        assert node.meta.get("nn_module_stack") == sources[0].get("nn_module_stack")
        assert [source.name for source in node.meta["from_node"]] == list(origin.nodes)
        assert {source.pass_name for source in node.meta["from_node"]} == {transformation.name}
    if form != "export":  # graphs straight from torch.export do not pickle
        loaded = pickle.loads(pickle.dumps(graph_module))
        assert [each for _, each in made(loaded)] == list(found.values())
