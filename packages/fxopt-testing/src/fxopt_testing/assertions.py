"""Assertions for the tests of one pass: code before and after (`code_of`), exact counts, near misses, and the way back.

All of them take a model or a graph module, and its inputs, and never change it. A failure is an AssertionError that
shows graphs and refusals.
"""

from __future__ import annotations

import ast
import copy
import difflib
import textwrap
from collections.abc import Collection, Mapping
from typing import NoReturn

from torch import nn
from torch.fx import Graph, GraphModule

from fxopt_core import (
    PreconditionError,
    Refusal,
    ReversibleTransformation,
    Transformation,
    faithful_copy,
    history,
    type_text,
)
from fxopt_testing.forms import Form, graph_of
from fxopt_testing.outcomes import behaviour_of, unlike
from fxopt_testing.pictures import bits_of, changes, picture, state_of
from fxopt_testing.rewrites import structure
from fxopt_tools import Inputs
from fxopt_tools.verification.report import counted


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
    # Not the `code` of the graph module, which is outdated until the graph module is recompiled.
    return "\n".join(normal_lines(graph.python_code("self").src))


def normal_lines(text: str) -> list[str]:
    """Return code as `code_of` writes it; a body without its ``def`` is indented as one.

    Raises:
        PreconditionError: The code is not Python.
    """
    text = textwrap.dedent(text).strip()
    if "def " not in text:
        text = f"def forward(self):\n{textwrap.indent(text, '    ')}"
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise PreconditionError(f"the expected graph is not Python code: {error}") from None
    function = next(each for each in tree.body if isinstance(each, ast.FunctionDef))
    function.returns = None
    names: dict[str, str] = {}  # of arguments, where torch had to find others: ``input_1 = input``
    body: list[ast.stmt] = []
    for line in function.body:
        # `relu : torch.Tensor = ...`, as torch.fx writes a node with a `type`.
        if isinstance(line, ast.AnnAssign) and line.value is not None:
            line = ast.copy_location(ast.Assign([line.target], line.value), line)
        match line:
            case ast.Assign(value=ast.Constant(value=None)):
                pass  # torch releases a value
            case ast.Assign(targets=[ast.Name(id=other)], value=ast.Name(id=argument)):
                names[other] = argument
            case _:
                body.append(line)
    function.body = body or [ast.Pass()]
    for node in ast.walk(function):
        if isinstance(node, ast.Name):
            node.id = names.get(node.id, node.id)
        elif isinstance(node, ast.arg):
            node.annotation = None
    return ast.unparse(function).splitlines()


def assert_code(graph_module: GraphModule, expected: str, *, what: str = "the graph") -> None:
    """Assert that a graph is this code, whatever its layout; without ``def``, only the body is compared.

    Args:
        graph_module: the graph module.
        expected: the code, as `code_of` writes it.
        what: what the message calls the graph.

    Raises:
        AssertionError: The code differs; the message shows how.

    >>> from torch.fx import symbolic_trace
    >>> assert_code(symbolic_trace(lambda x: x.relu() * 2), '''
    ...     relu = x.relu()
    ...     mul = relu * 2
    ...     return mul
    ... ''')
    """
    found, wanted = normal_lines(code_of(graph_module)), normal_lines(expected)
    # `normal_lines` has put a signature without arguments above the body.
    if "def " not in expected:
        found, wanted = found[1:], wanted[1:]
    if found != wanted:
        difference = "\n".join(difflib.unified_diff(wanted, found, "expected", "found", lineterm="", n=99))
        raise AssertionError(f"{what} differs from the expected code:\n{difference}")


def assert_rewrites(
    transformation: Transformation,
    model: nn.Module,
    *inputs: object,
    count: int | None = None,
    before: str | None = None,
    after: str | None = None,
    refused: Collection[str] | None = None,
    form: Form = "modules",
    others: Collection[tuple[object, ...]] = (),
    gradients: bool = True,
    exact: bool = False,
    again: bool = True,
) -> GraphModule:
    """Assert that a pass rewrites a model as expected, and keeps what every rewrite has to keep.

    The caller's model stays as it was, bit for bit. If the pass claims ``preserves_computation``, results, effects on
    inputs and gradients stay, and a second run changes nothing. If it can be reversed, that restores everything
    exactly, and the pass can be applied again.

    Args:
        transformation: the pass.
        model: a model or a graph module.
        *inputs: the inputs of the call; `fxopt_tools.Inputs` for keyword arguments.
        count: how many sites are rewritten; if None, at least one, or any change if the pass marks nothing.
        before: the code of the graph before the pass, as `code_of` writes it, or its body.
        after: the code of the graph after it.
        refused: the reason codes of the sites that are left alone, each as often as it occurs; if None, any.
        form: the form of graph: "modules", "functions", "export", ...
        others: further positional arguments; those that the guards of an export refuse are left out.
        gradients: whether gradients are compared, too.
        exact: whether results are the same bit for bit, not only to the tolerance of their dtype.
        again: whether the pass is applied once more after reversing, which does not restore the shape of every value.

    Returns:
        The rewritten graph module.

    Raises:
        AssertionError: Something differs.

    >>> import torch
    >>> from fxopt_core import iter_nodes
    >>> class Doubled(Transformation):
    ...     def transform(self, graph_module):
    ...         for node in iter_nodes(graph_module.graph):
    ...             if node.target is torch.relu:
    ...                 node.target = torch.tanh
    ...         return graph_module
    >>> class Model(nn.Module):
    ...     def forward(self, x):
    ...         return torch.relu(x)
    >>> result = assert_rewrites(Doubled(), Model(), torch.ones(2), after="relu = torch.tanh(x); return relu")
    """
    name, given = transformation.name, _inputs_of(inputs)
    graph_module = _graph_module_of(model, given, form)
    caller = nn.Module() if isinstance(model, GraphModule) else model
    untouched = state_of(caller)
    if before is not None:
        assert_code(graph_module, before, what=f"before {name}, the graph")
    # A graph module may come with records of earlier runs: they are the first `known`.
    source, former, known = faithful_copy(graph_module), structure(graph_module), len(history(graph_module))
    result = transformation(graph_module)
    sites, refusals = _sites_of(result, known)
    once = structure(result)
    if count is None and not sites and picture(source) == picture(result):
        _fail(f"{name} changed nothing", result, refusals)
    if count is not None and sites != count:
        _fail(f"{name} rewrote {counted(sites, 'site')}, expected {count}", result, refusals)
    if refused is not None and sorted(refused) != sorted(each.reason for each in refusals):
        wanted = ", ".join(sorted(refused)) or "none"
        _fail(f"{name} refused {counted(len(refusals), 'site')}, expected reasons: {wanted}", result, refusals)
    if after is not None:
        assert_code(result, after, what=f"after {name}, the graph")
    if transformation.preserves_computation:
        for each in (given, *(Inputs(*more) for more in others)):
            try:
                expected = behaviour_of(source, copy.deepcopy(each), gradients=gradients)
            except Exception:
                if each is given or not form.startswith("export"):  # only guards of an export may refuse inputs
                    raise
                continue
            found = behaviour_of(result, copy.deepcopy(each), gradients=gradients)
            if exact and bits_of(dict(found.outcome.output)) != bits_of(dict(expected.outcome.output)):
                _fail(f"after {name}, results are not the same bit for bit", result, refusals)
            for difference in unlike(source, result, each, expected, found):
                what = f"{difference.what}: {difference.text}"
                _fail(f"after {name}, the model computes something else: {what}", result, refusals)
        result = transformation(result)
        _assert_equal(f"after {name} a second time", once, structure(result), result)
    if isinstance(transformation, ReversibleTransformation) and transformation.reversible:
        result = transformation(result, reverse=True)
        _assert_equal(f"after undoing {name}", former, structure(result), result)
        if again:
            result = transformation(result)
            assert structure(result).keys() == once.keys(), f"{name} does something else after it was undone"
    _assert_equal(f"after {name}, in the caller's model", untouched, state_of(caller), result)
    return result


def _assert_equal(when: str, before: Mapping[str, object], after: Mapping[str, object], shown: GraphModule) -> None:
    for what, now, was in changes(before, after, limit=1):
        _fail(f"{when}, {what} is {now}, was {was}", shown, ())


def assert_left_alone(
    transformation: Transformation,
    model: nn.Module,
    *inputs: object,
    reason: str | None = None,
    form: Form = "modules",
) -> tuple[Refusal, ...]:
    """Assert that a pass changes nothing: a near miss, something that looks like a site but is not one.

    Args:
        transformation: the pass.
        model: a model or a graph module.
        *inputs: the inputs of the call.
        reason: the reason code of at least one of the refusals; if None, any.
        form: the form of graph.

    Returns:
        The refusals.

    Raises:
        AssertionError: It was rewritten, or refused for other reasons.

    >>> import torch
    >>> from fxopt_core import LintAndRecompile
    >>> assert_left_alone(LintAndRecompile(), nn.ReLU(), torch.ones(2))
    ()
    """
    graph_module = _graph_module_of(model, _inputs_of(inputs), form)
    former, known = picture(graph_module), len(history(graph_module))
    result = transformation(graph_module)
    _, refusals = _sites_of(result, known)
    for what, now, was in changes(former, picture(result), limit=1):
        _fail(f"{transformation.name} should leave the model alone, but {what} is {now}, was {was}", result, refusals)
    if reason is not None and reason not in {each.reason for each in refusals}:
        _fail(f"{transformation.name} refused nothing for reason {reason!r}", result, refusals)
    return refusals


def _graph_module_of(model: object, inputs: Inputs, form: Form) -> GraphModule:
    """Return a model in a form of graph, with its own modules; a graph module is copied as it is."""
    if isinstance(model, GraphModule):
        return faithful_copy(model)
    if not isinstance(model, nn.Module):
        made = f"; write {model.__name__}()" if isinstance(model, type) else ""
        raise PreconditionError(f"an assertion is given {type_text(model)}, expected a model{made}")
    return graph_of(model, form, inputs)


def _inputs_of(inputs: tuple[object, ...]) -> Inputs:
    """Return the inputs of a call: `Inputs` as they are, other values as positional arguments."""
    return inputs[0] if len(inputs) == 1 and isinstance(inputs[0], Inputs) else Inputs(*inputs)


def _sites_of(graph_module: GraphModule, known: int) -> tuple[int, tuple[Refusal, ...]]:
    """Return how many sites the records after the first ``known`` have rewritten, and which they have refused."""
    records = history(graph_module)[known:]
    refusals = tuple(refusal for record in records for refusal in record.refusals)
    return sum(len(record.rewrites) for record in records), refusals


def _fail(what: str, graph_module: GraphModule, refusals: Collection[Refusal]) -> NoReturn:
    lines = [what, *(f"  refused ({each.reason}): {each.message}" for each in refusals), code_of(graph_module)]
    raise AssertionError("\n".join(lines))
