"""The graph module of a reproducer as data, and back.

Tensors, and objects that can only be pickled, are listed beside the data; every other value has a form in it. Modules
of torch are made again from their attributes. Those of other classes are needed only where a graph calls them as a
whole; there they are written by the name of their class, and elsewhere they are plain containers. Marks and records of
earlier passes are left out, and so are guards, such as ``torch.export`` puts in.

From a file that is not trusted, only torch's functions of tensors and its layers are used; nothing is imported, and no
pickle is opened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import Graph, GraphModule, Node
from torch.fx.graph import CodeGen
from torch.fx.passes.shape_prop import TensorMetadata
from torch.nn.parameter import UninitializedParameter

from fxopt_core import FxoptError, PreconditionError, iter_nodes
from fxopt_core._torch import PyTreeCodeGen, generator_class, pytree_info
from fxopt_core.travel.graph_rows import read_graph, write_graph
from fxopt_core.values.forms import Form, ValueReader, ValueWriter
from fxopt_core.values.names import IMPORTED, name_of
from fxopt_rewrite.layers import plain_attributes
from fxopt_rewrite.module_rows import check_targets, check_values, new_module, read_modules, write_modules
from fxopt_rewrite.plain_names import PLAIN, layer_class
from fxopt_tools.inputs import Inputs

_TRUST = "To import and {} what the file names, whatever it does, say trusted=True, if you trust whoever wrote the file"
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def function_name(function: object) -> str | None:
    """Return the name by which a function or class is written; None if another program cannot import it.

    >>> import operator
    >>> function_name(operator.add), function_name(lambda: 0)
    ('_operator:add', None)
    """
    name = name_of(function)
    return None if name is not None and name.startswith("__main__:") else name


class DataWriter(ValueWriter):
    """Writes values; collects the tensors among them, each once, and the objects with neither a form nor a name."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.objects: list[object] = []
        self._numbers: dict[int, int] = {}
        kinds: tuple[type, ...] = (Tensor, nn.Parameter)
        own = dict.fromkeys(kinds, lambda _, tensor: self.tensor(tensor))
        super().__init__(own, self.objects, IMPORTED._replace(name=function_name))

    def tensor(self, tensor: Tensor) -> Form:
        """Return the form of a tensor."""
        number = self._numbers.setdefault(id(tensor), len(self.tensors))
        if number == len(self.tensors):
            self.tensors.append(tensor)
        return {"tensor": number}


class DataReader(ValueReader):
    """Reads what a `DataWriter` wrote, and imports functions and classes of any package if that is trusted."""

    def __init__(self, tensors: Sequence[Tensor], objects: Sequence[object] = (), *, trusted: bool = False) -> None:
        super().__init__({"tensor": lambda _, number: tensors[number]}, objects, IMPORTED if trusted else PLAIN)
        self.trusted = trusted

    def read(self, form: Form) -> Any:
        """Return a value.

        Raises:
            PreconditionError: It is not to be trusted, or there is no such value.
        """
        try:
            return super().read(form)
        except PreconditionError:
            raise
        except (FxoptError, LookupError, TypeError) as error:
            remedy = "" if self.trusted else f". {_TRUST.format('run')}"
            raise PreconditionError(f"{str(form)[:80]} of the reproducer cannot be read: {error}{remedy}") from error

    def _object(self, number: Any) -> object:
        if not self.trusted:
            raise PreconditionError(
                f"the reproducer holds pickled objects, and opening a pickle can run any code. {_TRUST.format('open')}"
            )
        return super()._object(number)

    def module_class(self, name: str) -> type[nn.Module]:
        """Return the class of modules of this name.

        Raises:
            PreconditionError: It is no class of modules, or, in data that is not trusted, neither one of torch.nn nor
                one that a plugin offers.
        """
        found = self.read({"name": name}) if self.trusted else layer_class(name)
        if not isinstance(found, type) or not issubclass(found, nn.Module):
            raise PreconditionError(
                f"the reproducer uses modules of the class {name}, which is none of torch.nn, and none that a plugin "
                f"offers. {_TRUST.format('run')}"
            )
        return found


def module_data(graph_module: GraphModule, writer: DataWriter, notes: list[str]) -> list[Form]:
    """Return the modules of a graph module, and the graphs, as data; what has to be left out is noted.

    Raises:
        FxoptError: A module or a graph cannot be written.
    """
    needed = _called(graph_module)

    def tensor(name: str, tensor: Tensor) -> Form:
        if isinstance(tensor, UninitializedParameter):
            raise PreconditionError(f"`{name}` is not initialised yet: call the model once first")
        return writer.tensor(tensor)

    def extra(name: str, module: nn.Module) -> Mapping[str, Form]:
        whole = any(name == each or name.startswith(f"{each}.") for each in needed)
        if whole and any(vars(module).get(key) for key in _HOOKS):
            notes.append(f"module `{name}` has hooks, which are left out")
        row: dict[str, Form] = {}
        if isinstance(module, GraphModule):
            row["graph"] = _graph_data(module, writer)
        elif whole:
            row["class"] = _importable(type(module), f"module `{name}` is a", "class")
        kept = [each for each in plain_attributes(module) if "class" in row or isinstance(each[1], Tensor)]
        return {**row, "attributes": [[key, writer.write(value)] for key, value in kept]}

    return write_modules(graph_module, tensor, extra)


def _called(graph_module: GraphModule) -> set[str]:
    """Return the full names of the modules that a graph calls, or hands on, as a whole; not guards and other graphs."""
    found: set[str] = set()
    for prefix, inner in graph_module.named_modules(remove_duplicate=False):
        if isinstance(inner, GraphModule):
            modules = dict(inner.named_modules(remove_duplicate=False))
            read = (node for node in iter_nodes(inner.graph) if node.op in ("call_module", "get_attr"))
            names = {str(node.target) for node in read if not _is_guard(node, modules)}
            whole = (name for name in names if name in modules and not isinstance(modules[name], GraphModule))
            found |= {f"{prefix}.{name}" if prefix else name for name in whole}
    return found


def _is_guard(node: Node, modules: Mapping[str, nn.Module]) -> bool:
    """Return whether a node calls a module that only looks at inputs: no guard is one of torch.nn's."""
    module = modules.get(str(node.target)) if node.op == "call_module" else None
    return module is not None and not node.users and not type(module).__module__.startswith("torch.nn.")


def _importable(target: Any, who: str, kind: str) -> str:
    """Return the name of a class or function that another program can import."""
    name = function_name(target)
    if name is None:
        shown = f"{target.__module__}.{target.__qualname__}" if isinstance(target, type) else target
        raise PreconditionError(
            f"{who} {shown}, expected a {kind} that can be imported by its name: define it at the top of a module, "
            "other than the script that is run"
        )
    return name


def _graph_data(graph_module: GraphModule, writer: DataWriter) -> Form:
    modules = dict(graph_module.named_modules(remove_duplicate=False))
    nodes = [node for node in iter_nodes(graph_module.graph) if not _is_guard(node, modules)]
    for node in nodes:
        if node.op == "call_function":
            _importable(node.target, f"node `{node.name}` calls", "function")
    return write_graph(graph_module.graph, writer, _value, nodes)


def _value(node: Node) -> dict[str, Form]:
    """Return what is known of a node's tensor; sizes that were symbols are those of the example."""
    for key in ("val", "tensor_meta"):
        value: Any = node.meta.get(key)
        if isinstance(value, (Tensor, TensorMetadata)):
            stride = value.stride if isinstance(value, TensorMetadata) else value.stride()
            sizes, strides = [*map(_size, value.shape)], [*map(_size, stride)]
            if None not in sizes and None not in strides:
                dtype = str(value.dtype).removeprefix("torch.")
                return {"value": [{"dtype": dtype}, sizes, strides, bool(value.requires_grad)]}
    return {}


def _size(size: object) -> int | None:
    if isinstance(size, torch.SymInt):
        size = getattr(size.node, "hint", None)
    return size if isinstance(size, int) else None


def read_graph_module(rows: list[Form], reader: DataReader) -> GraphModule:
    """Return the graph module that `module_data` has written.

    Raises:
        PreconditionError: A module or a function in it is not to be trusted, or is missing here.
    """

    def instance(row: Mapping[str, Form]) -> nn.Module:
        cls = GraphModule if "graph" in row else reader.module_class(row["class"]) if "class" in row else nn.Module
        attributes = [(key, reader.read(form)) for key, form in row["attributes"]]
        return new_module(cls, attributes, trusted=reader.trusted)

    try:
        made = read_modules(rows, instance, reader.read)
        for row in reversed(rows):
            module = made[row["name"]]
            if "graph" in row and isinstance(module, GraphModule):
                graph = read_graph(row["graph"], reader, lambda node, row: _read_value(node, row, reader))
                if not reader.trusted:
                    check_values(graph)
                    check_targets(graph, module)
                module.graph = graph
    except PreconditionError:
        raise
    except FxoptError as error:
        raise PreconditionError(f"the graph of the reproducer cannot be built: {error}; see trusted=True") from error
    root = made[""]
    if not isinstance(root, GraphModule):
        raise PreconditionError("the reproducer holds no graph")
    return root


def _read_value(node: Node, row: Mapping[str, Form], reader: DataReader) -> None:
    if "value" in row:
        dtype, sizes, strides, requires_grad = reader.read(row["value"])
        if not isinstance(dtype, torch.dtype):
            raise PreconditionError(f"{dtype!r:.40} is no dtype")
        form = torch.contiguous_format
        meta = TensorMetadata(torch.Size(sizes), dtype, requires_grad, tuple(strides), form, False, {})
        node.meta["tensor_meta"] = meta


def placeholder_values(graph_module: GraphModule, inputs: Inputs) -> list[Any]:
    """Return the value of each placeholder when a graph module is called with inputs.

    Raises:
        PreconditionError: It does not take them.
    """
    graph, info = Graph(), pytree_info(graph_module.graph)
    copies = [graph.node_copy(node) for node in iter_nodes(graph_module.graph) if node.op == "placeholder"]
    for node in copies:
        node.meta.clear()
    graph.output(tuple(copies))
    if info is not None:
        graph.set_codegen(PyTreeCodeGen(info._replace(out_spec=None)))
    elif (cls := generator_class(graph_module.graph)) is not CodeGen:
        raise PreconditionError(f"the graph has a code generator of its own, {cls.__name__}")
    try:
        return list(GraphModule(nn.Module(), graph)(*inputs.args, **inputs.kwargs))
    except Exception as error:
        raise PreconditionError(
            f"the graph module does not take the inputs: {type(error).__name__}: {error}"
        ) from error
