"""`read_operation`: what a node computes, with which arguments, in every form of graph.

A product is ``operator.mul`` in a traced graph, ``torch.mul`` or the method ``mul`` if the model calls them, and
``aten.mul.Tensor`` in a graph of ``torch.export``; ``nn.ReLU``, ``F.relu`` and ``aten.relu.default`` are equal as well.
A pass that compares ``node.target`` with one of them finds nothing in the other graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, cast

from torch import nn
from torch.fx import GraphModule, Node

from fxopt_core import (
    check_graph_module,
    iter_nodes,
)
from fxopt_rewrite.calls.records import Obstacle, Operand, TensorRef
from fxopt_rewrite.index import GraphIndex
from fxopt_rewrite.layers import conv1d_class, module_problem
from fxopt_rewrite.ops.names import MISSING
from fxopt_rewrite.ops.vocabulary import (
    MODULES,
    Called,
    bind,
    called,
    called_function,
    plain,
    signature_of,
)

_TENSORS = ("weight", "bias", "running_mean", "running_var")


@dataclass(frozen=True, eq=False)
class Operation:
    """What a node computes.

    Attributes:
        node: the call.
        name: its name in torch's functional API: ``linear``, ``conv2d``, ``relu``, ``add``, ``view``.
        module: the module that is called; None for a function, method or operator.
        module_name: full name of that module, or "".
    """

    node: Node
    name: str
    module: nn.Module | None
    module_name: str
    _read: Callable[[], tuple[Mapping[str, Any], bool]]  # once they are asked for: most walks look at names alone

    @cached_property
    def _bound(self) -> tuple[Mapping[str, Any], bool]:
        return self._read()

    @property
    def arguments(self) -> Mapping[str, Any]:
        """Its arguments by the names of torch's signature, with defaults; lists are tuples.

        Weights, biases and running statistics that modules hold or ``get_attr`` nodes read are `TensorRef`; computed
        values are nodes.
        """
        return self._bound[0]

    @property
    def inplace(self) -> bool:
        """Whether it writes its result into its first argument."""
        return self._bound[1]

    @property
    def input(self) -> Node | None:
        """The argument called ``input``, or else the first one; None if it is not a node."""
        value = self.arguments.get("input", next(iter(self.arguments.values()), None))
        return value if isinstance(value, Node) else None

    @property
    def operands(self) -> tuple[Operand, ...]:
        """The first two of its arguments that are not settings."""
        return tuple(self.arguments[name] for name in ("input", "other", "exponent", "mat2") if name in self.arguments)


def read_operation(index: GraphIndex, node: Node) -> Operation | None:
    """Return what a node computes, the same for modules, functions, methods, ``aten`` and Python's operators.

    None for inputs, attributes and outputs, for calls of what is not torch's, and for modules that are not plain: with
    hooks, of a subclass, or with extra state.

    >>> import torch
    >>> model = nn.Sequential(nn.Conv2d(3, 8, 1))
    >>> index = GraphIndex(torch.fx.symbolic_trace(model))
    >>> operation = read_operation(index, index.nodes[1])
    >>> operation.name, operation.arguments["stride"], operation.arguments["weight"].name
    ('conv2d', (1, 1), '0.weight')
    """
    found = read_layer(index, node)
    return found if isinstance(found, Operation) else None


def read_layer(index: GraphIndex, node: Node, names: frozenset[str] = frozenset()) -> Operation | Obstacle | None:
    """Return what a node computes if it is one of these operations, or why its module cannot be read."""
    if node.op == "call_module":
        return _read_module(index, node, names)
    target = called(node)
    if target is None or (target.name not in names and names):
        return None
    return Operation(node, target.name, None, "", lambda: _arguments(index, node, target))


def read_call(node: Node) -> Operation | None:
    """Return what a function or method node computes, with nodes for its tensors; None for other nodes."""
    target = called(node)
    return None if target is None else Operation(node, target.name, None, "", lambda: _arguments(None, node, target))


def _arguments(index: GraphIndex | None, node: Node, target: Called) -> tuple[Mapping[str, Any], bool]:
    args = node.args[:1] if node.target is getattr else node.args
    found, inplace = bind(target, args, {} if node.target is getattr else node.kwargs)
    for key in _TENSORS if index is not None else ():
        value = found.get(key)
        tensor = index.tensor_of(value) if isinstance(value, Node) and index is not None else None
        if isinstance(value, Node) and tensor is not None:
            found[key] = TensorRef(str(value.target), tensor, value)
    return found, inplace


def _read_module(index: GraphIndex, node: Node, names: frozenset[str]) -> Operation | Obstacle | None:
    module, full = index.module_of(node), str(node.target)
    if module is None:
        return None
    conv1d: Any = conv1d_class()
    cls: Any = type(module)  # mypy takes classes of modules for unhashable
    name = name_of_module(cls, conv1d)
    if name is None or (names and name not in names):
        return None
    classes = classes_of(names or frozenset((name,)), conv1d)
    if ".quantized." in cls.__module__ and not isinstance(module, classes):
        return Obstacle(full, "not-a-parameter", f"module `{full}` is quantized ({cls.__module__})")
    problem = module_problem(module, classes)
    if problem is not None:
        return Obstacle(full, problem[0], f"module `{full}` {problem[1]}")
    value = input_of(node)
    given = [*node.args, *(each for each in node.kwargs.values() if each is not None)]
    if value is None or len(given) != 1:
        return Obstacle(full, "unsupported-call", f"node `{node.name}` calls module `{full}` with further arguments")
    return Operation(node, name, module, full, lambda: _of_module(name, value, full, module))


@cache
def name_of_module(cls: type[Any], conv1d: type[Any] | None) -> str | None:
    """Return what modules of a class compute, or of its base class, or of the class that it is a quantized form of."""
    if conv1d is not None and issubclass(cls, conv1d):
        return "addmm"
    found = next((MODULES[each] for each in cls.__mro__ if each in MODULES), None)
    # `torch.ao.nn.quantized.Linear` has the name of `nn.Linear`, but is not a subclass of it.
    if found is None and ".quantized." in cls.__module__:
        found = next((name for each, name in MODULES.items() if each.__name__ == cls.__name__), None)
    return found


@cache
def classes_of(names: frozenset[str], conv1d: type[Any] | None) -> tuple[type[nn.Module], ...]:
    """Return the modules that compute these operations."""
    found = tuple(cls for cls, name in MODULES.items() if name in names)
    return found if conv1d is None or "addmm" not in names else (*found, conv1d)


def _of_module(name: str, value: Node, full: str, module: Any) -> tuple[Mapping[str, Any], bool]:
    if name == "addmm":
        # `Conv1D` computes `addmm(bias, x, weight)` with its inputs as rows, and a weight of shape (in, out).
        ref = {key: module_tensor(module, full, key) for key in ("weight", "bias")}
        return {"input": ref["bias"], "mat1": value, "mat2": ref["weight"], "beta": 1, "alpha": 1}, False
    found: dict[str, Any] = {}
    for key, default in signature_of(name).items():
        if key in _TENSORS:
            found[key] = module_tensor(module, full, key)
        else:
            # `nn.ConstantPad2d` holds as `padding` what `F.pad` calls `pad`.
            attribute = {"pad": "padding"}.get(key, key) if name == "pad" else key
            given = value if key == "input" else getattr(module, attribute, default)
            if given is not MISSING:
                found[key] = plain(name, key, given)
    mode = getattr(module, "padding_mode", "zeros")
    return {**found, **({} if mode == "zeros" else {"padding_mode": mode})}, bool(getattr(module, "inplace", False))


def computed_by(module: nn.Module, value: Node) -> tuple[str, Mapping[str, Any]] | None:
    """Return the operation that calling a module with a value computes, and its arguments; tensors are `TensorRef`.

    None unless the module is of a class of ``torch.nn`` that computes one operation.
    """
    name = MODULES.get(type(module))
    return None if name is None else (name, _of_module(name, value, "", module)[0])


def module_tensor(module: nn.Module, name: str, key: str) -> TensorRef | None:
    """Return a parameter or buffer of a module with this full name; None if it has none."""
    parameter = module._parameters.get(key)
    tensor = module._buffers.get(key) if parameter is None else parameter
    return None if tensor is None else TensorRef(f"{name}.{key}" if name else key, tensor, None)


def input_of(node: Node) -> Node | None:
    """Return the input of a layer's call: its first argument, or the one called ``input``.

    The input of ``addmm`` is the second argument, after the bias.
    """
    target = called(node)
    if target is not None and target.name in ("addmm", "embedding"):
        value = bind(target, node.args, node.kwargs)[0].get("mat1" if target.name == "addmm" else "input")
    else:
        value = (
            node.args[0] if node.args else next((node.kwargs[name] for name in _INPUTS if name in node.kwargs), None)
        )
    return value if isinstance(value, Node) else None


#: Names of the input: of functions and modules, of operators, and of `Conv1D`.
_INPUTS = ("input", "self", "x")


def calls_of(graph_module: GraphModule, *operations: Callable[..., object]) -> list[Node]:
    """Return the nodes that call one of these operations in any form, in order.

    See `is_call`. The list does not change with the graph, so the graph may be edited while walking it.

    Raises:
        PreconditionError: The first argument is not a graph module.
        TypeError: An operation is not a function, or is a class of layers that have parameters or settings.

    >>> import operator, torch
    >>> class Product(nn.Module):
    ...     def forward(self, x, y):
    ...         return (x * y).relu()
    >>> traced = torch.fx.symbolic_trace(Product())
    >>> exported = torch.export.export(Product(), (torch.ones(2), torch.ones(2))).module()
    >>> [calls_of(each, operator.mul, nn.ReLU) for each in (traced, exported)]
    [[mul, relu], [mul, relu]]
    """
    check_graph_module(graph_module, "calls_of")
    wanted = list(map(_wanted, operations))
    return [node for node in iter_nodes(graph_module.graph) if _is_one_of(node, graph_module, wanted)]


def is_call(node: Node, *operations: Callable[..., object]) -> bool:
    """Return whether a node calls one of these operations: as function, method, ATen operator or module.

    Synonyms count (``torch.multiply`` for ``torch.mul``). In-place forms (``mul_``, ``inplace=True``, ``out=``) count
    only if asked for. ``torch.add`` with an ``alpha``, ``torch.div`` with a ``rounding_mode``, ``rsub``, whose operands
    are exchanged, and modules with hooks do not count. Of modules, only activations without settings count; read layers
    by `read_operation` or the typed readers. A function that is not torch's equals only itself. `operands_of` returns
    one or two operands.

    Raises:
        TypeError: See `calls_of`.

    >>> import operator, torch
    >>> graph = torch.fx.Graph()
    >>> x = graph.placeholder("x")
    >>> tuple(is_call(graph.call_method(name, (x, 2)), operator.mul) for name in ("mul", "mul_"))
    (True, False)
    """
    return _is_one_of(node, node.graph.owning_module, list(map(_wanted, operations)))


def operands_of(node: Node) -> tuple[Operand, ...]:
    """Return the one or two operands of a call in order, whether they are given by position or by name.

    For a function that is not torch's, they are its first two positional arguments, whatever these are.

    >>> import torch
    >>> graph = torch.fx.Graph()
    >>> x = graph.placeholder("x")
    >>> operands_of(graph.call_function(torch.mul, (), {"other": 2, "input": x}))
    (x, 2)
    """
    operation = read_call(node)
    return cast("tuple[Operand, ...]", node.args[:2]) if operation is None else operation.operands


def _wanted(operation: Any) -> tuple[object, tuple[str, bool] | None]:
    """Return an operation, with its name and whether it works in place; None for one that torch does not have."""
    if isinstance(operation, type) and operation in MODULES and len(signature_of(MODULES[operation])) == 1:
        return operation, (MODULES[operation], False)
    if not callable(operation) or isinstance(operation, nn.Module | type):
        raise TypeError(
            f"expected an operation, such as operator.mul, torch.mul, torch.nn.functional.relu or torch.nn.ReLU, found "
            f"{operation!r}; layers with parameters or settings are read by read_linear, read_convolution and "
            "read_batch_norm"
        )
    called = called_function(operation)
    return operation, None if called is None else (called.name, called.inplace)


def _is_one_of(node: Node, owner: nn.Module | None, wanted: list[tuple[object, tuple[str, bool] | None]]) -> bool:
    if node.op == "call_module":
        module = None if owner is None else owner.get_submodule(str(node.target))
        name = None if module is None else MODULES.get(type(module))
        if name is None or getattr(module, "inplace", False) or module_problem(module, (type(module),)) is not None:  # type: ignore[arg-type]  # name is None without a module
            return False
        return len(signature_of(name)) == 1 and any(found == (name, False) for _, found in wanted)
    target = called(node)
    if target is None:
        return node.op == "call_function" and any(found is None and node.target is each for each, found in wanted)
    if not any(found is not None and found[0] == target.name for _, found in wanted):
        return False
    arguments, inplace = bind(target, node.args, node.kwargs)
    plainly = all(arguments.get(key, value) == value for key, value in MODIFIERS.items())
    return plainly and any(found == (target.name, inplace) for _, found in wanted)


#: Arguments that change the operation, unless they have this value.
MODIFIERS: Mapping[str, object] = {"alpha": 1, "rounding_mode": None, "out": None}
