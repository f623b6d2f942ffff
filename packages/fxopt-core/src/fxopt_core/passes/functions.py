"""Passes made of plain functions and of torch's own passes; nodes that these make or change are marked."""

from __future__ import annotations

import functools
import inspect
import sys
from abc import abstractmethod
from collections.abc import Callable, Mapping
from inspect import Parameter
from types import FunctionType, MappingProxyType
from typing import Any, ClassVar, overload

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.fx.node import map_arg
from torch.fx.passes.infra.pass_base import PassResult

from fxopt_core.errors import PostconditionError
from fxopt_core.graph import iter_nodes
from fxopt_core.naming import kebab_case, type_text
from fxopt_core.passes.options import kept, resolved_signature
from fxopt_core.passes.signature import signature_of, uuid_of
from fxopt_core.passes.transformation import Transformation
from fxopt_core.values.names import source_of


class WrappedPass(Transformation):
    """Foreign code as a pass: nodes that it made or changed are marked, each a site of the record."""

    def transform(self, graph_module: GraphModule) -> GraphModule:
        """Run the code, and mark what it changed."""
        before = {node.name: _NodePicture(graph_module, node) for node in iter_nodes(graph_module.graph)}
        returned = self._call_wrapped(graph_module)
        found = returned.graph_module if isinstance(returned, PassResult) else returned
        result: object = graph_module if returned is None else found
        if not isinstance(result, GraphModule):
            raise PostconditionError(
                f"pass `{self.name}` returned {type_text(returned)}, expected a PassResult, a graph module, or "
                "None for one that was edited in place",
                pass_name=self.name,
            )
        for node in iter_nodes(result.graph):
            picture, earlier = _NodePicture(result, node), before.get(node.name)
            if earlier is None or not earlier.equals(picture, same_module=result is graph_module):
                self.mark_as_transformed(node)
        return result

    @abstractmethod
    def _call_wrapped(self, graph_module: GraphModule) -> object:
        """Return what the code returns."""


class TorchPass(WrappedPass):
    """A torch pass as a transformation; made by `from_torch_pass`."""

    def __init__(
        self, torch_pass: Callable[..., object], given: Mapping[str, object], *, preserves_computation: bool = False
    ) -> None:
        self._torch_pass = torch_pass
        self._given: Mapping[str, object] = {name: kept(value) for name, value in given.items()}
        self._identity = _identity(torch_pass)
        self.preserves_computation = preserves_computation  # type: ignore[misc]  # a fact about this one

    def _call_wrapped(self, graph_module: GraphModule) -> object:
        if isinstance(self._torch_pass, type):
            return self._torch_pass(**self._given)(graph_module)
        if _takes_graph(self._torch_pass):
            self._torch_pass(graph_module.graph)
            return graph_module
        return self._torch_pass(graph_module, **self._given)

    @property
    def name(self) -> str:
        """The name of the wrapped function or class in kebab case."""
        return kebab_case(_plain_name(self._torch_pass))

    @property
    def options(self) -> Mapping[str, object]:
        """The keyword arguments that the wrapped code gets."""
        return MappingProxyType(dict(self._given))

    @property
    def signature(self) -> str:
        """A digest of the wrapped code's module and qualified name, of its options, and of an object's attributes."""
        return signature_of(TorchPass, {"torch_pass": self._identity, "options": dict(self._given)})

    def uuid(self) -> str:
        """A digest as the signature, of the code and its version, too."""
        return uuid_of(TorchPass, {"torch_pass": self._identity, "options": dict(self._given)})

    def __repr__(self) -> str:
        """Return the call that makes an equal one, as far as there is one."""
        given = "".join(f", {name}={value!r}" for name, value in self._given.items())
        instance = not isinstance(self._torch_pass, (type, FunctionType))
        return f"from_torch_pass({_plain_name(self._torch_pass)}{'()' * instance}{given})"


def from_torch_pass(
    torch_pass: Callable[..., object], /, *, preserves_computation: bool = False, **options: object
) -> Transformation:
    """Return a torch pass, or a plain function, as a transformation.

    It runs as a transaction, marks the nodes that it made or changed, and leaves a record. It cannot be reversed.

    Args:
        torch_pass: a `PassBase`, its class, inductor's `CustomGraphPass`, or a function from a graph module to a
            `PassResult`, to a graph module, or, for one that edits in place, to None.
        preserves_computation: whether its result computes what its input did.
        **options: keyword arguments for the function, or for the constructor of the class.

    Raises:
        TypeError: The function is a lambda, or one inside of another, so that it has no name that is the same in every
            process; an object has attributes without a stable value; or an option is not taken.

    >>> import torch
    >>> from torch.fx.passes.dialect.common.cse_pass import CSEPass
    >>> class Twice(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.sin(x) + torch.sin(x)
    >>> from torch.fx.experimental.proxy_tensor import make_fx
    >>> graph_module = make_fx(Twice())(torch.ones(2))
    >>> from fxopt_core import history
    >>> [rewrite.site for rewrite in history(from_torch_pass(CSEPass())(graph_module))[-1].rewrites]
    ['add']
    """
    _check_wrappable(torch_pass, options)
    made = TorchPass(torch_pass, options, preserves_computation=preserves_computation)
    made.signature  # noqa: B018  # one without a stable value is told now, not when the pass marks its first node
    return made


class FunctionPass(WrappedPass):
    """A plain function as a pass; `from_function` makes a subclass of each."""

    _function: ClassVar[Callable[..., object]]

    def __init__(self, **options: Any) -> None:
        """Take the keyword parameters of the function; `Transformation` keeps them."""

    def _call_wrapped(self, graph_module: GraphModule) -> object:
        return type(self)._function(graph_module, **self.options)

    def uuid(self) -> str:
        """A digest of class, options and version, and of the function's code."""
        return signature_of(type(self), {"class": super().uuid(), "code": source_of(type(self)._function)})


@overload
def from_function(function: Callable[..., object], /) -> type[FunctionPass]: ...
@overload
def from_function(*, preserves_computation: bool = False) -> Callable[[Callable[..., object]], type[FunctionPass]]: ...
def from_function(
    function: Callable[..., object] | None = None, /, *, preserves_computation: bool = False
) -> type[FunctionPass] | Callable[[Callable[..., object]], type[FunctionPass]]:
    """Make a class of passes of a function, as a decorator: the shortest way to write a pass.

    The function edits the graph of its one positional argument; it returns None, or a graph module. Its keyword
    parameters, which have defaults, are the options of the pass, its name in kebab case is the pass's name, and the
    first line of its docstring is the summary. Nodes that it makes or changes are marked.

    Args:
        function: the function.
        preserves_computation: whether the result computes what the input did.

    Raises:
        TypeError: It is no function with a name, or has other parameters.

    >>> import operator, torch
    >>> @from_function
    ... def mul_to_add(graph_module, *, only: str = ""):
    ...     \"\"\"``x * y`` -> ``x + y``.\"\"\"
    ...     for node in iter_nodes(graph_module.graph):
    ...         if node.target is operator.mul and only in node.name:
    ...             node.target = operator.add
    >>> mul_to_add(only="mul"), mul_to_add().name
    (mul_to_add(only='mul'), 'mul-to-add')
    """
    if function is None:
        return lambda function: _class_of(function, preserves_computation)
    return _class_of(function, preserves_computation)


def _class_of(function: Callable[..., object], preserves_computation: bool) -> type[FunctionPass]:
    if not isinstance(function, FunctionType) or function.__name__ == "<lambda>":
        raise TypeError(f"from_function is given {_described(function)}, expected a function that is made by `def`")
    parameters = list(resolved_signature(function).parameters.values())
    first, rest = parameters[:1], parameters[1:]
    wrong = [each.name for each in rest if each.kind is not Parameter.KEYWORD_ONLY or each.default is Parameter.empty]
    if [each.kind for each in first] not in ([Parameter.POSITIONAL_ONLY], [Parameter.POSITIONAL_OR_KEYWORD]):
        raise TypeError(f"{function.__qualname__} takes no graph module: give it one positional parameter")
    if wrong:
        raise TypeError(
            f"{function.__qualname__} has the parameters {', '.join(wrong)}, expected options: one positional "
            "parameter, a star, and then keyword parameters with defaults"
        )

    @functools.wraps(function)
    def __init__(self: FunctionPass, **options: object) -> None:
        """Take the options."""

    own = Parameter("self", Parameter.POSITIONAL_ONLY)
    vars(__init__)["__signature__"] = inspect.Signature([own, *rest])
    members = {"__init__": __init__, "_function": staticmethod(function), "__doc__": function.__doc__}
    members |= {"__module__": function.__module__, "__qualname__": function.__qualname__}
    return type(function.__name__, (FunctionPass,), {**members, "preserves_computation": preserves_computation})


def _check_wrappable(torch_pass: object, options: Mapping[str, object]) -> None:
    if isinstance(torch_pass, (Transformation, nn.Module, functools.partial)) or not callable(torch_pass):
        raise TypeError(
            f"from_torch_pass is given {_described(torch_pass)}, expected a PassBase, its class, or a function of a "
            "graph module"
        )
    if isinstance(torch_pass, type) and issubclass(torch_pass, Transformation):
        raise TypeError(f"{torch_pass.__qualname__} is a transformation already: write {torch_pass.__qualname__}()")
    arguments = () if isinstance(torch_pass, type) else (None,)
    try:
        inspect.signature(torch_pass).bind(*arguments, **options)
    except ValueError:  # built in: nothing says what it takes
        return
    except TypeError as error:
        raise TypeError(f"from_torch_pass cannot call {_plain_name(torch_pass)}: {error}") from None


def _identity(torch_pass: Callable[..., object]) -> object:
    """Return what tells a torch pass from others, in signatures: itself, or an object's class and attributes."""
    if hasattr(torch_pass, "__qualname__"):
        return torch_pass
    return type(torch_pass), kept(dict(getattr(torch_pass, "__dict__", {})))


def _takes_graph(torch_pass: object) -> bool:
    module = sys.modules.get("torch._inductor.custom_graph_pass")  # without it, there is no such object
    return module is not None and isinstance(torch_pass, module.CustomGraphPass)


def _plain_name(torch_pass: Any) -> str:
    return str(getattr(torch_pass, "__name__", None) or type(torch_pass).__name__)


def _described(value: object) -> str:
    return "a lambda" if getattr(value, "__name__", "") == "<lambda>" else type_text(value)


class _NodePicture:
    """All that a node is, with names in place of other nodes, and what it gets from the graph module."""

    def __init__(self, graph_module: GraphModule, node: Node) -> None:
        args, kwargs = map_arg((node.args, node.kwargs), lambda other: f"%{other.name}")
        self._node = node.op, node.target, args, kwargs
        self._objects: list[object] = []
        path, _, attribute = str(node.target).rpartition(".")
        try:
            if node.op == "call_module":
                module = graph_module.get_submodule(str(node.target))
                self._objects = [module, *module.parameters(), *module.buffers()]
            elif node.op == "get_attr":
                self._objects = [getattr(graph_module.get_submodule(path), attribute, None)]
        except AttributeError:  # a broken graph, which the check at the end of the run reports
            return

    def equals(self, later: _NodePicture, *, same_module: bool) -> bool:
        """Return whether node, module and tensors are the same; in a copied graph module, equal values are."""
        pairs = list(zip(self._objects, later._objects, strict=False))
        same = all(mine is its if same_module else _equal(mine, its) for mine, its in pairs)
        return same and len(self._objects) == len(later._objects) and _alike(self._node, later._node)


def _equal(value: object, new: object) -> bool:
    """Return whether two modules are of one class, or two tensors hold the same, as far as they have values."""
    if not (isinstance(value, Tensor) and isinstance(new, Tensor)) or type(value) is not type(new):
        return type(value) is type(new)
    form = (value.dtype, value.shape, value.device) == (new.dtype, new.shape, new.device)
    return form and (value.is_meta or type(value) not in (Tensor, nn.Parameter) or torch.equal(value, new))


def _alike(left: Any, right: Any) -> bool:
    """Return whether two arguments are equal, type and all: 1 is not 1.0."""
    if left is right or type(left) is not type(right):
        return left is right
    if isinstance(left, (tuple, list)):
        return len(left) == len(right) and all(map(_alike, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_alike(left[key], right[key]) for key in left)
    try:
        return bool(left == right)
    except Exception:  # what compares to a tensor, or not at all
        return False
