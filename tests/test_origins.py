"""Every node that a shipped pass makes says where it came from, on every form; the model's own lines of source stay."""

from __future__ import annotations

import pickle

import pytest
from test_same_sites import EXPECTED, FORMS, made as graph_of
from torch.fx import GraphModule

from fxopt_arith import ChangeTrueDivToMulByInverse
from fxopt_core import Transformation, iter_nodes, tag_of
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


def origins(graph_module: GraphModule) -> dict[str, tuple[str, tuple[str, ...]]]:
    """The passes that made nodes, and the nodes that they replaced, by the name of the new node."""
    tags = {node.name: tag_of(node) for node in iter_nodes(graph_module.graph)}
    return {name: tag.origin for name, tag in tags.items() if tag.origin is not None}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cls", ALL)
def test_new_nodes_say_where_they_came_from(cls: type[Transformation], form: Form) -> None:
    """Pass, nodes, trace, module stack and torch's own chain of sources; after pickling, too."""
    graph_module = with_traces(form)
    before = {node.name: dict(node.meta) for node in iter_nodes(graph_module.graph)}
    transformation = cls()
    transformation(graph_module)
    new = [node for node in iter_nodes(graph_module.graph) if node.name not in before]
    found = origins(graph_module)
    assert list(found) == [node.name for node in new]
    for node in new:
        pass_name, nodes = found[node.name]
        assert (pass_name, tag_of(node).marks) == (transformation.name, (transformation.signature,))
        sources = [before[name] for name in nodes]
        assert node.meta["stack_trace"] == sources[0]["stack_trace"]
        assert node.meta.get("nn_module_stack") == sources[0].get("nn_module_stack")
        assert [source.name for source in node.meta["from_node"]] == list(nodes)
        assert {source.pass_name for source in node.meta["from_node"]} == {transformation.name}
    if form != "export":  # graphs straight from torch.export do not pickle
        loaded = pickle.loads(pickle.dumps(graph_module))
        assert origins(loaded) == found
