"""The seam to torch.fx: the one file of fxopt that names private fields of graphs, nodes and code generators.

torch.fx keeps what an exact rollback, copy or pickle needs in fields without public access: the order of users and
inputs, the names that are taken, how far torch has counted for each of them, the lookup table behind `find_nodes`. When
torch moves these, this file changes. It looks for all of them at import, so that an untried torch is one clear error
here and not a wrong graph later.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, TypeAlias

import torch
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen, PythonCode
from torch.utils import _pytree as pytree

# Every field of a node; some are public, but `Node.__setattr__` runs hooks on them too.
_PUBLIC_FIELDS = ("op", "target", "name", "type", "graph", "meta", "users")
NODE_FIELDS = (*_PUBLIC_FIELDS, "_args", "_kwargs", "_sort_key", "_erased", "_repr_fn", "_input_nodes")
_GRAPH_FIELDS = ("_root", "_codegen", "_graph_namespace", "_find_nodes_lookup_table", "_insert", "_len", "_co_fields")
# Fields of a graph that a new one has too, empty, and that a copy takes over.
OWN_GRAPH_FIELDS = ("_used_names", "_co_fields", "_tracer_extras")
_NAME_FIELDS = ("_used_names", "_base_count", "_obj_to_name", "associate_name_with_obj")
_LINKS = ("_prev", "_next", "_update_args_kwargs", "_rename")


def _check() -> None:
    """Look for all that this file names; raise an `ImportError` where this torch lacks some of it."""
    graph = Graph()
    wanted: list[tuple[object, Iterable[str]]] = [
        (torch.fx.graph, ("_ExportCodeGen", "_Namespace", "_PyTreeCodeGen", "_PyTreeInfo")),
        (torch.fx.graph_module, ("_WrappedCall",)),
        (torch.fx.node, ("_get_qualified_name",)),
        (graph, (*_GRAPH_FIELDS, "_tracer_cls")),
        (getattr(graph, "_graph_namespace", None), _NAME_FIELDS),
        (getattr(graph, "_find_nodes_lookup_table", None), ("table", "insert")),
        (graph.placeholder("x"), (*NODE_FIELDS, *_LINKS)),
        (CodeGen(), ("_body_transformer", "_gen_python_code")),
    ]
    missing = [
        f"{getattr(part, '__name__', type(part).__name__)}.{name}"
        for part, names in wanted
        for name in names
        if part is not None and not hasattr(part, name)
    ]
    if missing:
        raise ImportError(
            f"torch {torch.__version__} has no {', '.join(missing)}, which fxopt-core needs to copy, roll back and "
            "pickle graphs; install the torch that this fxopt-core was tested with (2.13 and 2.15), or a newer one"
        )


_check()

Namespace = torch.fx.graph._Namespace
PyTreeCodeGen = torch.fx.graph._PyTreeCodeGen
PyTreeInfo: TypeAlias = torch.fx.graph._PyTreeInfo
ExportCodeGen = torch.fx.graph._ExportCodeGen
WrappedCall = torch.fx.graph_module._WrappedCall


# --- Nodes


def inputs_of(node: Node) -> dict[Node, None]:
    """Return the nodes that a node reads, in the order in which torch keeps them: `all_input_nodes` without a copy."""
    return node._input_nodes


def set_arguments(node: Node, args: Any, kwargs: Any) -> None:
    """Set the arguments of a node as they are: torch's properties copy them and look for symbolic numbers."""
    node._update_args_kwargs(args, kwargs)


def set_name(node: Node, name: str) -> None:
    """Rename a node; torch makes the name unique."""
    node._rename(name)


def set_order(nodes: dict[Node, None], order: Iterable[Node]) -> None:
    """Bring the users or the inputs of a node, the same ones, into the order that they are to have."""
    ordered = dict.fromkeys(order)
    nodes.clear()
    nodes.update(ordered)


def sentinel(graph: Graph) -> Node:
    """Return the node before the first one, which is also the one after the last."""
    return graph._root


def first_node(graph: Graph) -> Node:
    """Return the first node of a graph; the sentinel of an empty one."""
    return graph._root.next


def link(nodes: Iterable[Node]) -> None:
    """Chain nodes in this order, the last to the first, without calling hooks. The first is the sentinel."""
    ring = list(nodes)
    for before, after in zip(ring, [*ring[1:], ring[0]], strict=True):
        object.__setattr__(before, "_next", after)
        object.__setattr__(after, "_prev", before)


def add_node(graph: Graph, op: str, target: Any, name: str, type_expr: Any = None) -> Node:
    """Append a node without arguments, under exactly this name, without calling hooks.

    `Graph.create_node` would choose a name, and call the hooks of the graph's owner.

    >>> add_node(Graph(), "placeholder", "x", "any_name")
    any_name
    """
    node = Node(graph, name, op, target, (), {}, type_expr)
    graph._graph_namespace._used_names.add(name)
    graph._graph_namespace.associate_name_with_obj(name, node)
    graph._root.prepend(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


# --- Names


def taken_names(graph: Graph) -> set[str]:
    """Return the names that torch will not give to another node, as torch keeps them: a change counts."""
    return graph._graph_namespace._used_names


def name_counts(graph: Graph) -> dict[str, int]:
    """Return how far torch has counted for each base of a name, as torch keeps it: a change counts."""
    return graph._graph_namespace._base_count


# --- Graphs


def code_fields(graph: Graph) -> dict[str, Any]:
    """Return what torch keeps of the code object that a graph was traced from, as torch keeps it."""
    fields: dict[str, Any] = graph._co_fields
    return fields


def tracer_class(graph: Graph) -> Any:
    """Return the class of the tracer that made a graph, or None."""
    return graph._tracer_cls


def set_tracer_class(graph: Graph, cls: Any) -> None:
    """Set the class of the tracer that made a graph."""
    graph._tracer_cls = cls


def side_tables(graph: Graph) -> tuple[object, ...]:
    """Return the objects beside the nodes in which torch keeps the state of a graph."""
    return graph._graph_namespace, graph._find_nodes_lookup_table, graph._codegen


def copy_history(graph: Graph, twin: Graph, nodes: Mapping[Any, Node]) -> None:
    """Give a copy of a graph what depends on how the graph came about: sort keys, orders, taken names, insert point.

    ``nodes`` maps each node of the original, and its sentinel, to its copy.
    """
    for node, new in nodes.items():
        object.__setattr__(new, "_sort_key", node._sort_key)
        object.__setattr__(new, "_repr_fn", node._repr_fn)
        set_order(new.users, (nodes[user] for user in node.users if user in nodes))
        set_order(new._input_nodes, (nodes[value] for value in node._input_nodes if value in nodes))
    names, taken = graph._graph_namespace, twin._graph_namespace
    taken._used_names.update(names._used_names)
    taken._base_count.update(names._base_count)
    taken._obj_to_name = {nodes[obj]: name for obj, name in names._obj_to_name.items() if obj in nodes}
    lookup, table = graph._find_nodes_lookup_table.table, twin._find_nodes_lookup_table.table
    table.clear()
    table.update((key, {nodes[node]: None for node in found if node in nodes}) for key, found in lookup.items())
    insert = graph._insert
    if isinstance(insert, MethodType) and insert.__self__ in nodes:
        twin._insert = MethodType(insert.__func__, nodes[insert.__self__])


# --- Code generators


def codegen_of(graph: Graph) -> CodeGen:
    """Return the code generator of a graph."""
    return graph._codegen


def generator_class(graph: Graph) -> type[CodeGen]:
    """Return the class of a graph's code generator, or the class of torch's that it says it stands for.

    A pass may change how a graph runs by a generator derived from torch's, whose class attribute ``stands_for`` names
    torch's: inputs and outputs are the same.

    >>> generator_class(torch.fx.symbolic_trace(torch.nn.ReLU()).graph).__name__
    'CodeGen'
    """
    cls = type(graph._codegen)
    stands_for: type[CodeGen] = getattr(cls, "stands_for", cls)
    return stands_for


def pytree_info(graph: Graph) -> PyTreeInfo | None:
    """Return how a graph flattens its inputs and builds its output; None where it takes and returns plain values."""
    codegen = graph._codegen
    return codegen.pytree_info if isinstance(codegen, PyTreeCodeGen) else None


def set_pytree_info(
    graph: Graph, names: Sequence[str], inputs: pytree.TreeSpec, outputs: pytree.TreeSpec | None
) -> None:
    """Let a graph take arguments of these names, which nest as ``inputs``, and return what nests as ``outputs``."""
    graph.set_codegen(PyTreeCodeGen(PyTreeInfo(list(names), inputs, outputs)))


def drop_pytree_info(graph: Graph) -> None:
    """Let a graph take and return plain values, as its placeholders and its output say."""
    graph.set_codegen(CodeGen())


def set_output_spec(graph: Graph, outputs: pytree.TreeSpec) -> None:
    """Let the outputs of a graph nest in another way."""
    codegen = graph._codegen
    assert isinstance(codegen, PyTreeCodeGen)
    codegen.pytree_info = codegen.pytree_info._replace(out_spec=outputs)


def own_classes(graph_module: GraphModule) -> list[type]:
    """Return the classes that belong to one graph module alone: its own, and torch's underneath a swapped one."""
    classes = type(graph_module).__mro__
    own = [cls for cls in classes if cls is classes[0] or cls.__qualname__.endswith("GraphModuleImpl")]
    return [cls for cls in own if cls is not GraphModule]


def has_name_in_code(function: Callable[..., Any]) -> bool:
    """Return whether torch can write a call of a function as code; not of `bytes.fromhex`, which no module names."""
    try:
        return bool(torch.fx.node._get_qualified_name(function))
    except (AttributeError, RuntimeError):
        return False


def python_code(
    codegen: CodeGen, *args: Any, edit: Callable[[list[str]], list[str]] | None = None, **options: Any
) -> PythonCode:
    """Return the code that a generator writes for a graph, given what torch gave to its method that does so.

    ``edit`` changes the lines of the function's body; it is set on the generator, so pass a copy.
    """
    if edit is not None:
        earlier = codegen._body_transformer
        codegen._body_transformer = edit if earlier is None else lambda body: edit(earlier(body))
    return codegen._gen_python_code(*args, **options)


def with_class(codegen: CodeGen, cls: type[CodeGen]) -> CodeGen:
    """Return a code generator of another class with the same settings."""
    twin: CodeGen = cls.__new__(cls)
    vars(twin).update(vars(codegen))
    return twin
