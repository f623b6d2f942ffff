"""The function of a captured graph for a call whose arguments are known to be right.

    torch.ops.aten.relu.default(x)        ->  operator(x)             what an overload calls itself, found beforehand
    self.encoder.layer.query(x)           ->  query(x)                with `query` taken from `_modules` at the start
    self._guards_fn(x)                    ->  None                    the inputs are known to pass
    x, y, = tree_flatten_spec(...)        ->                          x and y are the arguments
    return tree_unflatten((x,), spec)     ->  return {"logits": x}

It is made of the source of the module's own ``forward``, statement by statement, and keeps its lines, so that an error
within names the same place. Nothing is decided about modules and operators: hooks run, and replaced layers count.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.fx import GraphModule
from torch.fx.graph_module import _loader
from torch.utils import _pytree as pytree

from fxopt_core.garbage import collector_paused

Path = tuple[str, ...]


def direct_graph(graph_module: GraphModule, forward: FunctionType, guards: nn.Module) -> Callable[..., Any] | None:
    """Return what runs in place of ``forward``: it takes the module and the graph's inputs, flat.

    It returns NotImplemented where a submodule is not found in the place that it had, with nothing computed.

    Args:
        graph_module: the module.
        forward: the function that the module's class has.
        guards: the submodule that only checks the inputs.

    Returns:
        The function, or None where `forward` is not one that torch.fx has written in the usual form.
    """
    with collector_paused():
        return _compiled(graph_module, forward, guards)


def _compiled(graph_module: GraphModule, forward: FunctionType, guards: nn.Module) -> Callable[..., Any] | None:
    source = _loader.get_source(forward.__code__.co_filename)
    if source is None:
        return None
    functions = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    if len(functions) != 1:
        return None
    names = _flat_inputs(functions[0]) if "_in_spec" in vars(graph_module) else inputs_of(forward)
    if names is None:
        return None
    rewriter = _Rewriter(functions[0], dict(forward.__globals__), graph_module, guards)
    rewriter.taken.update(forward.__code__.co_varnames, forward.__code__.co_names)
    return rewriter.function(names, forward.__code__.co_filename)


def inputs_of(forward: FunctionType) -> list[str]:
    """Return the names of the arguments of a ``forward``, but for ``self``."""
    return list(forward.__code__.co_varnames[1 : forward.__code__.co_argcount])


def _flat_inputs(function: ast.FunctionDef) -> list[str] | None:
    """Take out the statement that flattens the arguments, and return the names that it gives them."""
    for index, statement in enumerate(function.body):
        if isinstance(statement, ast.Assign) and _is_call(statement.value, "fx_pytree", "tree_flatten_spec"):
            (target,) = statement.targets
            if not isinstance(target, ast.Tuple):
                return None
            del function.body[index]
            return [element.id for element in target.elts if isinstance(element, ast.Name)]
        if not isinstance(statement, ast.AnnAssign):  # of which there is one for each annotated input
            return None
    return None


def _is_call(node: ast.AST, *path: str) -> bool:
    return isinstance(node, ast.Call) and _dotted(node.func) == path


def _dotted(node: ast.AST) -> Path | None:
    """Return ``("torch", "ops")`` for ``torch.ops``; ``getattr(self, "0")`` is ``("self", "0")``."""
    if isinstance(node, ast.Name):
        return (node.id,)
    if isinstance(node, ast.Attribute):
        owner, name = _dotted(node.value), node.attr
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        match node.args:
            case [value, ast.Constant(value=str(name))]:
                owner = _dotted(value)
            case _:
                return None
    else:
        return None
    return None if owner is None else (*owner, name)


def _is_registered(spec: pytree.TreeSpec) -> bool:
    return spec.is_leaf() or (spec.type in pytree.SUPPORTED_NODES and all(map(_is_registered, spec.children())))


class _Rewriter(ast.NodeTransformer):
    """Rewrites one ``forward``."""

    def __init__(
        self, function: ast.FunctionDef, namespace: dict[str, Any], graph_module: GraphModule, guards: nn.Module
    ) -> None:
        self.source, self.namespace = function, namespace
        self.graph_module, self.guards = graph_module, guards
        self.taken = set(namespace)
        self.modules: dict[Path, str] = {}
        self.operators: dict[Path, str | None] = {}

    def function(self, inputs: list[str], filename: str) -> Callable[..., Any]:
        """Return the compiled function that takes these inputs."""
        body = [self.visit(statement) for statement in self.source.body]
        arguments = [ast.copy_location(ast.arg(name), self.source) for name in ("self", *inputs)]
        self.source.args = ast.arguments(posonlyargs=[], args=arguments, kwonlyargs=[], kw_defaults=[], defaults=[])
        self.source.returns = None
        self.source.body = [*self._lookups(), *body]
        exec(compile(ast.Module([self.source], []), filename, "exec", dont_inherit=True), self.namespace)
        run: Callable[..., Any] = self.namespace[self.source.name]
        return run

    def _lookups(self) -> list[ast.stmt]:
        """Return the statements that find all submodules, before anything runs."""
        if not self.modules:
            return []
        lines = [f"    {name} = {self._lookup(path)}" for path, name in self.modules.items()]
        lines = ["try:", *lines, "except (KeyError, AttributeError):", "    return NotImplemented"]
        return ast.parse("\n".join(lines)).body

    def _lookup(self, path: Path) -> str:
        return f"{self.modules.get(path[:-1], 'self')}._modules[{path[-1]!r}]"

    def visit_Call(self, node: ast.Call) -> ast.AST:
        """Rewrite a call of the guards, of a submodule or of an operator."""
        path = _dotted(node.func)
        if path is not None and self._is_guards(path):
            return ast.copy_location(ast.Constant(None), node)
        name = None
        if path is not None and len(path) > 1 and path[0] == "self":
            name = self._module(path[1:])
        elif path is not None and path[:2] == ("torch", "ops"):
            name = self._operator(path)
        elif (whole := _dotted(node)) is not None:
            return self._attribute(node, whole)
        self.generic_visit(node)
        if name is not None:
            node.func = ast.copy_location(ast.Name(name, ast.Load()), node.func)
        return node

    def _is_guards(self, path: Path) -> bool:
        return len(path) == 2 and path[0] == "self" and self.graph_module._modules.get(path[1]) is self.guards

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        """Rewrite what reads a tensor of a submodule."""
        path = _dotted(node)
        if path is None:
            self.generic_visit(node)
            return node
        return self._attribute(node, path)

    def _attribute(self, node: ast.Attribute | ast.Call, path: Path) -> ast.AST:
        if path[0] == "self" and len(path) > 2:
            owner = ast.copy_location(ast.Name(self._module(path[1:-1]), ast.Load()), node)
            if isinstance(node, ast.Attribute):
                node.value = owner
            else:
                node.args[0] = owner
        return node

    def visit_Return(self, node: ast.Return) -> ast.AST:
        """Rewrite the statement that puts the outputs together."""
        self.generic_visit(node)
        match node.value:
            case ast.Call(args=[ast.Tuple(elts=leaves) | ast.List(elts=leaves), ast.Attribute(attr="_out_spec")]) if (
                _is_call(node.value, "pytree", "tree_unflatten")
            ):
                spec = self.graph_module._out_spec
                if spec is not None and _is_registered(spec) and spec.num_leaves == len(leaves):
                    nested = ast.copy_location(self._nested(spec, iter(leaves)), node.value)
                    node.value = ast.fix_missing_locations(nested)
        return node

    def _nested(self, spec: pytree.TreeSpec, leaves: Iterator[ast.expr]) -> ast.expr:
        """Return the expression of an output that nests as torch's pytrees say it."""
        if spec.is_leaf():
            return next(leaves)
        children = [self._nested(child, leaves) for child in spec.children()]
        if spec.type is tuple:
            return ast.Tuple(children, ast.Load())
        if spec.type is list:
            return ast.List(children, ast.Load())
        if spec.type is dict:
            return ast.Dict([self._constant(key) for key in spec.context], children)
        unflatten = self._constant(pytree.SUPPORTED_NODES[spec.type].unflatten_fn)
        return ast.Call(unflatten, [ast.List(children, ast.Load()), self._constant(spec.context)], [])

    def _module(self, path: Path) -> str:
        """Return the variable of a submodule, which is found in that of its owner."""
        if path not in self.modules:
            if len(path) > 1:
                self._module(path[:-1])
            self.modules[path] = self._fresh(f"module_{len(self.modules)}")
        return self.modules[path]

    def _operator(self, path: Path) -> str | None:
        """Return the name of what an overload of an operator calls, None where that is not known."""
        if path not in self.operators:
            overload: Any = torch
            for name in path[1:]:
                overload = getattr(overload, name, None)
            # The class itself: subclasses do more at a call.
            is_plain = type(overload) is OpOverload
            self.operators[path] = self._constant(overload._op).id if is_plain else None
        return self.operators[path]

    def _constant(self, value: object) -> ast.Name:
        name = self._fresh(f"constant_{len(self.namespace)}")
        self.namespace[name] = value
        return ast.Name(name, ast.Load())

    def _fresh(self, name: str) -> str:
        while name in self.taken:
            name += "_"
        self.taken.add(name)
        return name
