"""Pickling a graph module as its graph, so that names, order, marks and unused nodes survive.

torch pickles the generated code and traces it again. A module that `install_pickling` has touched pickles the rows of
its graph instead, in `pickle`, `torch.save` and multiprocessing alike, and so do its deep copies. Other modules
pickle as ever.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils._pytree import TreeSpec, treespec_leaf

from fxopt_core._torch import PyTreeInfo, code_fields, codegen_of
from fxopt_core.errors import FxoptError
from fxopt_core.graph import iter_nodes
from fxopt_core.ledger.marks import META_KEY
from fxopt_core.names import class_path, describe, import_class, name_of
from fxopt_core.state.gc_pause import collector_paused
from fxopt_core.state.graph import GraphRows, own_classes

FORMAT = 5
"""Incremented when older versions of this module could not read what this one writes."""

_MADE_AGAIN = frozenset({"_graph", "_code", "_lineno_map", "_prologue_start", "_compiled_call_impl", "shape_env"})
_LEFT_TO_PICKLE = frozenset({"_parameters", "_buffers", "_modules"})
_IF_POSSIBLE: dict[str, Callable[[], object]] = {"_tracer_cls": lambda: None, "_tracer_extras": dict}
_KEPT_META = ("stack_trace", "from_node", "source_fn_stack", "custom")
_STACK = "nn_module_stack"
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})


def install_pickling(graph_module: GraphModule) -> None:
    """Make a graph module, and every deep copy of it, pickle its graph. Doing it again changes nothing.

    Raises:
        FxoptError: the class of the module was replaced by one that it shares with others.

    >>> graph_module = torch.fx.symbolic_trace(nn.ReLU())
    >>> next(iter(graph_module.graph.nodes)).name = "any_name"
    >>> install_pickling(graph_module)
    >>> [node.name for node in pickle.loads(pickle.dumps(graph_module)).graph.nodes]
    ['any_name', 'relu', 'output']
    """
    own = [cls for cls in own_classes(graph_module) if cls.__qualname__.endswith("GraphModuleImpl")]
    if not own:
        raise FxoptError(
            f"the graph module's class was replaced by {type(graph_module).__qualname__}, which it does not own; keep "
            "the class that torch makes for each graph module"
        )
    for name, function in (("__reduce_ex__", _reduce_ex), ("__copy__", _copy)):
        setattr(own[0], name, function)
    if install_pickling not in graph_module._deepcopy_hooks:
        graph_module._deepcopy_hooks.append(install_pickling)


def create(version: int, *arguments: Any) -> GraphModule:
    """Make an empty graph module for `fill`; pickle calls both."""
    if version > FORMAT:
        raise FxoptError(
            f"this graph module was pickled in format {version}, and this version reads formats up to {FORMAT}; "
            "upgrade fxopt-core"
        )
    cls, name = arguments
    graph_module: GraphModule = cls.__new__(cls)
    type(graph_module).__name__ = name
    return graph_module


def fill(graph_module: GraphModule, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
    """Give a graph module its attributes and its graph, and compile it."""
    attributes, written = state
    graph_module.__dict__.update(attributes)
    graph = Graph(tracer_cls=attributes.get("_tracer_cls"))
    with collector_paused():
        written["rows"].fill(graph)
    for node, meta in zip(iter_nodes(graph), written["metas"], strict=True):
        node.meta = meta
    code_fields(graph).update(written["code_fields"])
    graph.set_codegen(written["codegen"])
    graph.owning_module = graph_module
    graph_module.__dict__["_graph"] = graph
    graph_module.recompile()
    install_pickling(graph_module)


def _base(graph_module: GraphModule) -> Any:
    """Return the class from which torch derives a class for each graph module."""
    return next(cls for cls in type(graph_module).__mro__ if not cls.__qualname__.endswith("GraphModuleImpl"))


def _copy(self: GraphModule) -> GraphModule:
    """Copy as torch does, and let the copy, which shares the graph, pickle it too."""
    twin: GraphModule = _base(self).__copy__(self)
    install_pickling(twin)
    return twin


def _reduce_ex(self: GraphModule, protocol: int) -> tuple[Any, ...]:
    train = getattr(vars(self).get("train"), "__func__", None)
    if getattr(train, "__module__", None) == "torch.export.exported_program":
        raise FxoptError(
            "a graph module straight from `torch.export` cannot be pickled: torch compiles the checks of its inputs "
            "and drops their source; make it with `fxopt_capture.capture`, whose modules pickle, or save the program "
            "with `torch.export.save`"
        )
    writer, base = _Writer(protocol), _base(self)
    writer.part(base, "the class of the graph module")
    attributes: dict[str, Any] = {}
    for key, value in vars(self).items():
        if key in _MADE_AGAIN:
            value = None
        elif key == "meta":
            value = {name: entry for name, entry in value.items() if not writer.obstacle(entry)}
        elif key in _IF_POSSIBLE:
            value = _IF_POSSIBLE[key]() if writer.obstacle(value) else value
        elif key not in _LEFT_TO_PICKLE:
            value = writer.part(value, f"attribute {key!r} of the graph module")
        attributes[key] = value
    for name, module in self.named_modules():
        cls: Any = type(module)
        if isinstance(module, GraphModule):
            install_pickling(module)  # torch loses names in them too, and cannot trace what an export has made
            continue
        writer.part(cls, f"the class of module {name!r}")
        # What pickle would stop at further down, where its message names neither module nor attribute.
        if cls.__getstate__ is nn.Module.__getstate__ and cls.__reduce_ex__ is object.__reduce_ex__:
            for key, value in vars(module).items():
                if key not in _LEFT_TO_PICKLE:
                    writer.part(value, f"attribute {key!r} of module {name!r}")
    state = attributes, writer.graph(self.graph)
    return create, (FORMAT, base, type(self).__name__), state, None, None, fill


class _Probe(pickle.Pickler):
    """A pickler that passes over tensors and modules, which are large and pickled on their own."""

    def persistent_id(self, obj: Any) -> str | None:
        return "" if isinstance(obj, (Tensor, nn.Module)) else None


class _Writer:
    """Finds the picklable form of each part of a graph module, once for each object."""

    def __init__(self, protocol: int) -> None:
        self._protocol = protocol
        self._parts: dict[int, tuple[object, Any]] = {}  # by id, with what has it

    def obstacle(self, value: object) -> Exception | None:
        """Return the error of pickling a value, without its tensors and modules."""
        try:
            _Probe(io.BytesIO(), self._protocol).dump(value)
        except Exception as error:  # whatever pickling somebody's object raises
            return error
        return None

    def part(self, value: Any, what: str) -> Any:
        """Return the picklable form of a value, or raise; ``what`` says where the value is."""
        if type(value) in _ATOMS:
            return value
        if id(value) not in self._parts:
            self._parts[id(value)] = value, self._written(value, what)
        return self._parts[id(value)][1]

    def _written(self, value: Any, what: str) -> Any:
        if isinstance(value, _SYMBOLIC):
            raise FxoptError(
                f"{what} is the symbolic value {value}, which has no text form; compute it by a node of the graph "
                "(`torch.ops.aten.sym_size.int`), or use a number"
            )
        if isinstance(value, TreeSpec):
            return _spec_reference(value)
        if type(value) is PyTreeInfo:
            return _Rebuilt(PyTreeInfo, list(value.orig_args), *map(_spec_reference, value[1:]))
        # Older protocols of pickle have no memory formats, and none has operators and functions of C.
        is_format = isinstance(value, torch.memory_format)
        name = str(value).replace(".", ":", 1) if is_format else name_of(value)
        if name is not None:
            return _Rebuilt(import_class, name)
        obstacle = self.obstacle(value)
        if obstacle is not None:
            raise FxoptError(
                f"{what} cannot be pickled: {describe(value)} ({obstacle}); remove it, or use functions and classes "
                "that are defined at the top of a module. Undo what has replaced a class "
                "(torch.nn.utils.parametrize.remove_parametrizations)"
            ) from obstacle
        return value

    def graph(self, graph: Graph) -> dict[str, Any]:
        """Return a graph as rows."""
        codegen, rows = codegen_of(graph), GraphRows(graph)
        held = {key: self.part(value, f"the graph's code generator, {key},") for key, value in vars(codegen).items()}
        with collector_paused():
            metas = [self._meta(node) for node in rows.nodes]
            rows = rows.apart(lambda node, role, value: self.part(value, f"the {role} of node `{node.name}`"))
        made = _Rebuilt(_codegen, self.part(type(codegen), "the graph's code generator"), held)
        return {"rows": rows, "metas": metas, "codegen": made, "code_fields": dict(code_fields(graph))}

    def _meta(self, node: Node) -> dict[str, Any]:
        """Return what a pickle keeps of a node's ``meta``."""
        meta = {key: node.meta[key] for key in _KEPT_META if key in node.meta and not self.obstacle(node.meta[key])}
        stack = node.meta.get(_STACK)
        if isinstance(stack, dict) and all(isinstance(entry, tuple) and len(entry) == 2 for entry in stack.values()):
            kind = OrderedDict if isinstance(stack, OrderedDict) else dict
            meta[_STACK] = kind(
                (key, (path, _Rebuilt(_class_or_text, class_path(cls)) if isinstance(cls, type) else str(cls)))
                for key, (path, cls) in stack.items()
            )
        return meta | ({META_KEY: node.meta[META_KEY]} if META_KEY in node.meta else {})


def _class_or_text(path: str) -> object:
    """Return the class of this path, or, where it cannot be imported, its name as torch's own graphs have it."""
    try:
        return import_class(path)
    except Exception:  # whatever importing somebody's module raises
        return path.replace(":", ".")


class _Rebuilt:
    """The picklable form of an object: a function to call on loading, and its arguments."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._call


def _spec_reference(spec: TreeSpec | None) -> _Rebuilt | None:
    """Return the picklable form of a pytree specification, whose own form warns of a deprecated class."""
    if spec is None:
        return None
    if spec.is_leaf():
        return _Rebuilt(treespec_leaf)
    return _Rebuilt(TreeSpec, spec.type, spec.context, [_spec_reference(child) for child in spec.children()])


def _codegen(cls: type[CodeGen], attributes: dict[str, Any]) -> CodeGen:
    """Make a code generator of its class and attributes."""
    codegen = cls.__new__(cls)
    vars(codegen).update(attributes)
    return codegen
