"""Assertions for the tests of one pass: code before and after, exact counts, near misses, and the way back.

All of them take a model, a graph module or a `ModelCase`, and what the model is called with; the model itself is never
changed. What fails is an AssertionError that shows graphs and refusals.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection
from typing import NoReturn

from torch import nn
from torch.fx import GraphModule

from fxopt_core import Record, Refusal, ReversibleTransformation, Transformation, faithful_copy, history
from fxopt_testing.capturing import graph_module_of, inputs_of
from fxopt_testing.cases import ModelCase
from fxopt_testing.coding import code_of, normal_lines
from fxopt_testing.forms import Form
from fxopt_testing.pictures import changes, picture
from fxopt_tools import verify


def assert_code(graph_module: GraphModule, expected: str) -> None:
    """Assert that a graph is this code, whatever its layout; without ``def``, only the body is compared.

    Raises:
        AssertionError: It is another one; the message shows the difference.

    >>> from torch.fx import symbolic_trace
    >>> assert_code(symbolic_trace(lambda x: x.relu() * 2), '''
    ...     relu = x.relu()
    ...     mul = relu * 2
    ...     return mul
    ... ''')
    """
    _assert_code(graph_module, expected, "the graph")


def assert_rewrites(
    transformation: Transformation,
    model: nn.Module | ModelCase,
    *inputs: object,
    count: int | None = None,
    before: str | None = None,
    after: str | None = None,
    refused: Collection[str] = (),
    form: Form = "modules",
) -> GraphModule:
    """Assert that a pass rewrites a model, and that the result computes the same if the pass claims so.

    Args:
        transformation: the pass.
        model: a model, a graph module, or a case.
        *inputs: what it is called with; `fxopt_tools.Inputs` for keyword arguments.
        count: how many sites are rewritten; if None, one at least, or some change where the pass marks nothing.
        before: the code of the graph before the pass, as `code_of` writes it, or its body.
        after: the code of the graph after it.
        refused: the reason codes of the sites that are left alone, each as often as it occurs.
        form: the form of graph: "modules", "functions", "export", ...

    Returns:
        The rewritten graph module.

    Raises:
        AssertionError: Something is otherwise.

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
    given = inputs_of(model, inputs)
    graph_module = graph_module_of(model, given, form)
    if before is not None:
        _assert_code(graph_module, before, f"before {transformation.name}, the graph")
    source, former, known = faithful_copy(graph_module), picture(graph_module), len(history(graph_module))
    result = transformation(graph_module)
    records = history(result)[known:]
    if count is None and not _sites(records) and former == picture(result):
        _fail(f"{transformation.name} changed nothing", result, _refusals(records))
    _assert_sites(transformation.name, result, records, count, refused)
    if after is not None:
        _assert_code(result, after, f"after {transformation.name}, the graph")
    if transformation.preserves_computation:
        report = verify(source, faithful_copy(result), given)
        assert report, f"after {transformation.name}, the model computes something else: {report}\n{code_of(result)}"
    return result


def assert_left_alone(
    transformation: Transformation,
    model: nn.Module | ModelCase,
    *inputs: object,
    reason: str | None = None,
    form: Form = "modules",
) -> tuple[Refusal, ...]:
    """Assert that a pass changes nothing: a near miss, something that looks like a site and is none.

    Args:
        transformation: the pass.
        model: a model, a graph module, or a case.
        *inputs: what it is called with.
        reason: the reason code of one of the refusals at least; if None, none is asked for.
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
    graph_module = graph_module_of(model, inputs_of(model, inputs), form)
    former, known = picture(graph_module), len(history(graph_module))
    result = transformation(graph_module)
    records = history(result)[known:]
    refusals = _refusals(records)
    for what, now, was in changes(former, picture(result), limit=1):
        _fail(f"{transformation.name} is to leave the model alone, and {what} is {now}, was {was}", result, refusals)
    if reason is not None and reason not in {each.reason for each in refusals}:
        _fail(f"{transformation.name} refused nothing for reason {reason!r}", result, refusals)
    return refusals


def assert_round_trip(
    transformation: ReversibleTransformation, model: nn.Module | ModelCase, *inputs: object, form: Form = "modules"
) -> GraphModule:
    """Assert that a pass changes a model, and that reversing it brings everything back, bit for bit.

    Returns:
        The graph module, restored.

    Raises:
        AssertionError: The pass changed nothing, or something is not as it was.
    """
    graph_module = graph_module_of(model, inputs_of(model, inputs), form)
    before = picture(graph_module)
    result = transformation(graph_module)
    if before == picture(result):
        _fail(
            f"{transformation.name} changed nothing, so that there is nothing to undo",
            result,
            _refusals(history(result)),
        )
    restored = transformation(result, reverse=True)
    for what, now, was in changes(before, picture(restored), limit=1):
        _fail(f"after undoing {transformation.name}, {what} is {now}, was {was}", restored, ())
    return restored


def _assert_sites(
    name: str, result: GraphModule, records: Collection[Record], count: int | None, refused: Collection[str]
) -> None:
    sites, refusals = _sites(records), _refusals(records)
    if count is not None and sites != count:
        _fail(f"{name} rewrote {sites} sites, expected {count}", result, refusals)
    if sorted(refused) != sorted(each.reason for each in refusals) and (refused or count is not None):
        wanted = ", ".join(sorted(refused)) or "none"
        _fail(f"{name} refused {len(refusals)} sites, expected reasons: {wanted}", result, refusals)


def _assert_code(graph_module: GraphModule, expected: str, what: str) -> None:
    found, wanted = normal_lines(code_of(graph_module)), normal_lines(expected)
    if "def " not in expected:
        found, wanted = found[1:], wanted[1:]
    if found != wanted:
        difference = "\n".join(difflib.unified_diff(wanted, found, "expected", "found", lineterm="", n=99))
        raise AssertionError(f"{what} is not what is expected:\n{difference}")


def _sites(records: Collection[Record]) -> int:
    return sum(len(record.rewrites) for record in records)


def _refusals(records: Collection[Record]) -> tuple[Refusal, ...]:
    return tuple(refusal for record in records for refusal in record.refusals)


def _fail(what: str, graph_module: GraphModule, refusals: Collection[Refusal]) -> NoReturn:
    lines = [what, *(f"  refused ({each.reason}): {each.message}" for each in refusals), code_of(graph_module)]
    raise AssertionError("\n".join(lines))
