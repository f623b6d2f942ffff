"""`code_of`: what a graph computes, as code that reads well and compares well."""

from __future__ import annotations

import ast
import textwrap

from torch.fx import Graph, GraphModule

from fxopt_core import PreconditionError


def code_of(graph: GraphModule | Graph) -> str:
    """Return a graph as code, one line for each node: without imports, annotations, and releases of values.

    >>> import torch
    >>> from torch import nn
    >>> print(code_of(torch.fx.symbolic_trace(nn.Sequential(nn.Linear(4, 2), nn.ReLU()))))
    def forward(self, input):
        _0 = getattr(self, '0')(input)
        _1 = getattr(self, '1')(_0)
        return _1
    """
    graph = graph.graph if isinstance(graph, GraphModule) else graph
    return "\n".join(normal_lines(graph.python_code("self").src))


def normal_lines(text: str) -> list[str]:
    """Return code as `code_of` writes it; a body without its ``def`` is indented as one.

    Raises:
        PreconditionError: It is no Python.
    """
    text = textwrap.dedent(text).strip()
    if "def " not in text:
        text = f"def forward(self):\n{textwrap.indent(text, '    ')}"
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise PreconditionError(f"what a graph is to look like is no Python code: {error}") from None
    function = next(each for each in tree.body if isinstance(each, ast.FunctionDef))
    _Plain().visit(function)
    _rename_arguments(function)
    return ast.unparse(function).splitlines()


class _Plain(ast.NodeTransformer):
    """Leaves away what says nothing of the computation."""

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        """Drop annotations of the result and of arguments."""
        node.returns = None
        return self.generic_visit(node)

    def visit_arg(self, node: ast.arg) -> ast.AST:
        """Drop the annotation of an argument."""
        node.annotation = None
        return node

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        """Drop the annotation of a value."""
        assert node.value is not None
        return ast.copy_location(ast.Assign([node.target], node.value), node)

    def visit_Assign(self, node: ast.Assign) -> ast.AST | None:
        """Drop ``x = None``, by which torch releases a value."""
        is_release = isinstance(node.value, ast.Constant) and node.value.value is None
        return None if is_release else node


def _rename_arguments(function: ast.FunctionDef) -> None:
    """Give arguments their own names where torch had to find others: ``input_1 = input``."""
    others: dict[str, str] = {}
    body: list[ast.stmt] = []
    for line in function.body:
        match line:
            case ast.Assign(targets=[ast.Name(id=other)], value=ast.Name(id=argument)):
                others[other] = argument
            case _:
                body.append(line)
    function.body = body or [ast.Pass()]
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            node.id = others.get(node.id, node.id)
