"""Pickling a graph module as its graph, so that names, order, marks and unused nodes survive.

torch pickles the generated code and traces it again. A module that `install` has touched pickles the rows of its graph
instead, in `pickle`, `torch.save` and multiprocessing alike, and so do its deep copies. Other modules pickle as ever.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections import OrderedDict
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.utils._pytree import TreeSpec, treespec_leaf
from torch.utils.hooks import RemovableHandle

from fxopt_core._torch import PyTreeInfo, code_fields, codegen_of, has_name_in_code, set_tracer_class
from fxopt_core.errors import FxoptError
from fxopt_core.gc_pause import collector_paused
from fxopt_core.graph import iter_nodes
from fxopt_core.ledger.marks import META_KEY
from fxopt_core.state.graph import GraphRows, own_classes
from fxopt_core.values.names import class_path, describe, import_class, name_of

FORMAT = 3
"""Raised when older versions of this module could not read what this one writes."""

_MADE_AGAIN = frozenset({"_graph", "_code", "_lineno_map", "_prologue_start", "_compiled_call_impl"})
_TENSORS = frozenset({"_parameters", "_buffers"})
_KEPT_META = ("from_node", "source_fn_stack", "custom")
_STACK = "nn_module_stack"
_SYMBOLIC = (torch.SymInt, torch.SymFloat, torch.SymBool)
_ATOMS = frozenset({bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size})
_CONTAINERS = frozenset({dict, OrderedDict, list, set, tuple})
_DEFAULTS: dict[str, Any] = {"_tracer_cls": None, "_tracer_extras": {}}
_IMPORTABLE = (
    "classes and functions pickle by name: define it at the top of a module, or undo what has replaced it "
    "(torch.nn.utils.parametrize.remove_parametrizations)"
)
_REMEDY = "remove it, or use functions and classes that are defined at the top of a module"


def install(graph_module: GraphModule) -> None:
    """Make a graph module, and every deep copy of it, pickle its graph. Doing it again changes nothing.

    Raises:
        FxoptError: the class of the module was replaced by one that it shares with others.

    >>> graph_module = torch.fx.symbolic_trace(nn.ReLU())
    >>> next(iter(graph_module.graph.nodes)).name = "any_name"
    >>> install(graph_module)
    >>> [node.name for node in pickle.loads(pickle.dumps(graph_module)).graph.nodes]
    ['any_name', 'relu', 'output']
    """
    cls = _own_class(graph_module)
    for name, function in (("__reduce_ex__", _reduce_ex), ("__copy__", _copy)):
        setattr(cls, name, function)
    if install not in graph_module._deepcopy_hooks:
        graph_module._deepcopy_hooks.append(install)


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
    graph = _read(written)
    set_tracer_class(graph, attributes.get("_tracer_cls"))
    graph.owning_module = graph_module
    graph_module.__dict__["_graph"] = graph
    graph_module.recompile()
    install(graph_module)
    _keep_hook_numbers_apart(graph_module)


def _own_class(graph_module: GraphModule) -> type[GraphModule]:
    for cls in own_classes(graph_module):
        if cls.__qualname__.endswith("GraphModuleImpl"):
            return cls
    raise FxoptError(
        f"the graph module's class was replaced by {type(graph_module).__qualname__}, which it does not own; keep the "
        "class that torch makes for each graph module"
    )


def _base(graph_module: GraphModule) -> Any:
    """The class that torch derives one class for each graph module from."""
    return next(cls for cls in type(graph_module).__mro__ if not cls.__qualname__.endswith("GraphModuleImpl"))


def _copy(self: GraphModule) -> GraphModule:
    """Copy as torch does, and let the copy, which shares the graph, pickle it too."""
    twin: GraphModule = _base(self).__copy__(self)
    install(twin)
    return twin


def _reduce_ex(self: GraphModule, protocol: int) -> tuple[Any, ...]:
    _check_not_exported(self)
    prober = Prober(protocol)
    base = _base(self)
    _demand(prober, base, "the class of the graph module", _IMPORTABLE)
    attributes = {key: _attribute(self, key, value, prober) for key, value in vars(self).items()}
    for name, module in self.named_modules():
        if isinstance(module, GraphModule):
            install(module)  # torch loses names in them too, and cannot trace what an export has made
        else:
            _check_submodule(name, module, prober)
    state = attributes, _write(self.graph, prober)
    return create, (FORMAT, base, type(self).__name__), state, None, None, fill


def _check_not_exported(graph_module: GraphModule) -> None:
    train = getattr(vars(graph_module).get("train"), "__func__", None)
    if getattr(train, "__module__", None) == "torch.export.exported_program":
        raise FxoptError(
            "a graph module straight from `torch.export` cannot be pickled: torch compiles the checks of its inputs "
            "and drops their source; make it with `fxopt_capture.capture`, whose modules pickle, or save the program "
            "with `torch.export.save`"
        )


def bind(function: Any, graph_module: GraphModule) -> MethodType:
    """Bind a function to a graph module; `MethodType` itself has no name to pickle."""
    return MethodType(function, graph_module)


def _attribute(graph_module: GraphModule, key: str, value: Any, prober: Prober) -> Any:
    """Return what stands for one attribute of the graph module in a pickle."""
    if key in _MADE_AGAIN or key == "shape_env":
        return None
    if key in _TENSORS or key == "_modules" or isinstance(value, (Tensor, nn.Module)):
        return value
    if key == "meta":
        return {name: entry for name, entry in value.items() if name == META_KEY or prober.obstacle(entry) is None}
    if key in _DEFAULTS:
        return value if prober.obstacle(value) is None else copy.copy(_DEFAULTS[key])
    if isinstance(value, TreeSpec):
        return spec_reference(value)
    if isinstance(value, MethodType) and value.__self__ is graph_module:
        _demand(prober, value.__func__, f"attribute {key!r} of the graph module", _IMPORTABLE)
        return Rebuilt(bind, value.__func__, graph_module)
    _demand(prober, value, f"attribute {key!r} of the graph module", _REMEDY)
    return value


def _check_submodule(name: str, module: nn.Module, prober: Prober) -> None:
    """Find what pickle would stop at further down, where its message would name neither module nor attribute."""
    cls: Any = type(module)
    _demand(prober, cls, f"the class of module {name!r}", _IMPORTABLE)
    if cls.__getstate__ is nn.Module.__getstate__ and cls.__reduce_ex__ is object.__reduce_ex__:
        for key, value in vars(module).items():
            if key not in _TENSORS and key != "_modules":
                _demand(prober, value, f"attribute {key!r} of module {name!r}", _REMEDY)


def _demand(prober: Prober, value: object, what: str, remedy: str) -> None:
    obstacle = prober.obstacle(value)
    if obstacle is not None:
        raise FxoptError(f"{what} cannot be pickled: {describe(value)} ({obstacle}); {remedy}") from obstacle


def _keep_hook_numbers_apart(graph_module: GraphModule) -> None:
    """Let hooks that are registered from now on not replace those that came with the pickle."""
    for module in graph_module.modules():
        for key, hooks in vars(module).items():
            if key.endswith("_hooks") and isinstance(hooks, dict) and hooks:
                RemovableHandle.next_id = max(RemovableHandle.next_id, 1 + max(hooks))


# -- the graph


def _write(graph: Graph, prober: Prober) -> dict[str, Any]:
    """Return a graph as rows, with what stands in a pickle for functions, operators and classes."""
    rows, parts = GraphRows(graph), _Parts(prober)
    codegen = _codegen_reference(codegen_of(graph), prober)
    with collector_paused():
        metas = {position: meta for position, node in enumerate(rows.nodes) if (meta := parts.meta(node))}
        return {"rows": rows.apart(parts), "metas": metas, "codegen": codegen, "code_fields": dict(code_fields(graph))}


def _read(written: dict[str, Any]) -> Graph:
    graph = Graph()
    with collector_paused():
        written["rows"].fill(graph)
    for position, node in enumerate(iter_nodes(graph)):
        node.meta.update(written["metas"].get(position, {}))
        if _STACK in node.meta:
            node.meta[_STACK] = copy.copy(node.meta[_STACK])
    code_fields(graph).update(written["code_fields"])
    graph.set_codegen(written["codegen"])
    return graph


class _Parts:
    """Says what stands in a pickle for parts of nodes; each function, class and stack is one object there."""

    def __init__(self, prober: Prober) -> None:
        self._prober = prober
        self._known: dict[Any, Any] = {}
        self._parts: dict[tuple[str, int], Any] = {}  # by role and id of what they stand for

    def __call__(self, node: Node, role: str, value: Any) -> Any:
        """Return what stands for a target, an argument or a type annotation.

        Raises:
            FxoptError: it cannot be pickled.
        """
        if type(value) in _ATOMS:
            return value
        if (role, id(value)) not in self._parts:
            self._parts[role, id(value)] = self._part(node, role, value)
        return self._parts[role, id(value)]

    def _part(self, node: Node, role: str, value: Any) -> Any:
        if role == "target" and callable(value) and not has_name_in_code(value):
            raise FxoptError(
                f"node `{node.name}`, target: torch {torch.__version__} cannot write {describe(value)} in code; "
                "call it in a function at the top of a module, with `torch.fx.wrap`"
            )
        if isinstance(value, _SYMBOLIC):
            raise FxoptError(
                f"node `{node.name}`, {role}: the symbolic value {value} has no form; compute it by a node of the "
                "graph (`torch.ops.aten.sym_size.int`), or use a number"
            )
        # Older protocols of pickle have none for memory formats.
        is_format = isinstance(value, torch.memory_format)
        name = str(value).replace(".", ":", 1) if is_format else name_of(value)
        if name is not None:
            return self._once(name, import_class)
        obstacle = self._prober.obstacle(value)
        if obstacle is not None:
            raise FxoptError(
                f"node `{node.name}`, {role}: {describe(value)} cannot be pickled ({obstacle}); use functions and "
                "classes that can be imported by name, and values that pickle"
            ) from obstacle
        return value

    def _once(self, name: str, function: Callable[[str], object]) -> Any:
        return self._known.setdefault((name, function), Rebuilt(function, name))

    def meta(self, node: Node) -> dict[str, Any]:
        """Return what a pickle keeps of a node's ``meta``."""
        kept = {key: node.meta[key] for key in _KEPT_META if key in node.meta}
        meta = {key: value for key, value in kept.items() if self._prober.obstacle(value) is None}
        trace, stack = node.meta.get("stack_trace"), node.meta.get(_STACK)
        if isinstance(trace, str):
            meta["stack_trace"] = trace
        if isinstance(stack, dict) and all(isinstance(entry, tuple) and len(entry) == 2 for entry in stack.values()):
            named = ((key, path, cls if isinstance(cls, type) else str(cls)) for key, (path, cls) in stack.items())
            entries = tuple((str(key), str(path), cls) for key, path, cls in named)
            kind = OrderedDict if isinstance(stack, OrderedDict) else dict
            if (kind, entries) not in self._known:
                self._known[kind, entries] = kind((key, (path, self._class(cls))) for key, path, cls in entries)
            meta[_STACK] = self._known[kind, entries]
        return meta | ({META_KEY: node.meta[META_KEY]} if META_KEY in node.meta else {})

    def _class(self, cls: type | str) -> Any:
        return cls if isinstance(cls, str) else self._once(class_path(cls), class_or_text)


def class_or_text(path: str) -> object:
    """Return the class of this path, or, where it cannot be imported, its name as torch's own graphs have it."""
    try:
        return import_class(path)
    except Exception:  # whatever importing somebody's module raises
        return path.replace(":", ".")


def load_codegen(cls: type[CodeGen], attributes: dict[str, Any], tree: tuple[Any, ...] | None) -> CodeGen:
    """Make a code generator from its class, its attributes, and what describes its pytree inputs and outputs."""
    codegen = cls.__new__(cls)
    vars(codegen).update(attributes)
    if tree is not None:
        vars(codegen)["pytree_info"] = PyTreeInfo(*tree)
    return codegen


def _codegen_reference(codegen: CodeGen, prober: Prober) -> Rebuilt:
    attributes = {key: value for key, value in vars(codegen).items() if key != "pytree_info"}
    for name, value in (("class", type(codegen)), *attributes.items()):
        _demand(prober, value, f"the graph's code generator, {name}", _REMEDY)
    info = vars(codegen).get("pytree_info")
    tree = None
    if info is not None:
        tree = list(info.orig_args), *(spec and spec_reference(spec) for spec in (info.in_spec, info.out_spec))
    return Rebuilt(load_codegen, type(codegen), attributes, tree)


# -- what pickle cannot do by itself


class Rebuilt:
    """What stands for an object in a pickle: a function to call on reading, and its arguments."""

    def __init__(self, function: Callable[..., object], *arguments: object) -> None:
        self._call = function, arguments

    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return self._call


def spec_reference(spec: TreeSpec) -> Rebuilt:
    """Return what stands for a pytree specification; pickled as it is, its leaves warn of a deprecated class."""
    if spec.is_leaf():
        return Rebuilt(treespec_leaf)
    return Rebuilt(TreeSpec, spec.type, spec.context, [spec_reference(child) for child in spec.children()])


class _Probe(pickle.Pickler):
    """A pickler that passes over tensors and modules, which are large and pickled on their own."""

    def persistent_id(self, obj: Any) -> str | None:
        return "" if isinstance(obj, (Tensor, nn.Module)) else None


class Prober:
    """Says why a value cannot be pickled by a protocol; remembers the answers while the values live."""

    def __init__(self, protocol: int) -> None:
        self._protocol = protocol
        self._known: dict[int, tuple[object, Exception | None]] = {}

    def obstacle(self, value: object) -> Exception | None:
        """Return the error of pickling a value, without its tensors and modules.

        >>> Prober(2).obstacle(len), type(Prober(2).obstacle(lambda: 0)).__name__
        (None, 'PicklingError')
        """
        if type(value) in _ATOMS or (type(value) in _CONTAINERS and not value):
            return None
        if id(value) not in self._known:
            self._known[id(value)] = value, None
            try:
                _Probe(io.BytesIO(), self._protocol).dump(value)
            except Exception as error:
                self._known[id(value)] = value, error
        return self._known[id(value)][1]
