"""The model of a pass's own example: the graph that the pass gets when the example in its docstring runs."""

from __future__ import annotations

import contextlib
import doctest
import io
import sys
import warnings
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from fxopt_core import (
    Instrument,
    Ledger,
    PassRun,
    Transformation,
    faithful_copy,
    forget_ids,
    instrumented,
    iter_nodes,
    set_ledger,
)
from fxopt_testing.cases import ModelCase


class _Given(Instrument):
    """Keeps copies of the graph modules that passes of a class are given."""

    def __init__(self, cls: type[Transformation]) -> None:
        self._cls = cls
        self.graph_modules: list[GraphModule] = []

    def before_pass(self, run: PassRun, graph_module: GraphModule) -> None:
        if type(run.transformation) is self._cls and not run.reverse:
            given = faithful_copy(graph_module)
            set_ledger(given, Ledger())  # keeps undo from going back to earlier passes
            forget_ids(iter_nodes(given.graph))
            self.graph_modules.append(given)


def example_case(cls: type[Transformation]) -> ModelCase | None:
    """Return the first graph that the pass gets in its docstring, with inputs for the graph.

    The inputs are those that its nodes describe, or else guesses: floating-point tensors with as many features as a
    parameter has in one of its dimensions, or indices.

    Returns:
        None where there is no example, it fails, or no guess fits.

    >>> from fxopt_core import LintAndRecompile
    >>> example_case(LintAndRecompile).id
    'the example of LintAndRecompile[graph]'
    """
    examples = doctest.DocTestParser().get_examples(vars(cls).get("__doc__") or "")
    given = _Given(cls)
    source = "".join(example.source for example in examples)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.random.fork_rng(devices=[]):
        warnings.simplefilter("ignore")
        with contextlib.suppress(Exception), instrumented(given):  # an example that fails is its author's to test
            # As in doctest, the names are those of the module; a copy, so that the example sets none of them.
            exec(source, dict(vars(sys.modules[cls.__module__])))
        for graph_module in given.graph_modules:
            for inputs in _guesses(graph_module):
                with contextlib.suppress(Exception), torch.no_grad():
                    # On a copy: a call may write to buffers, and the case makes its models of this graph module.
                    faithful_copy(graph_module)(*inputs)
                    make = partial(faithful_copy, graph_module)
                    return ModelCase(f"the example of {cls.__name__}", make, inputs, form="graph", batched=False)
    return None


def _guesses(graph_module: GraphModule) -> Iterator[tuple[Tensor, ...]]:
    inputs = [node for node in iter_nodes(graph_module.graph) if node.op == "placeholder"]
    noted = [_noted(node) for node in inputs]
    if all(value is not None for value in noted):
        yield tuple(value for value in noted if value is not None)
    for size in dict.fromkeys([*(size for each in graph_module.parameters() for size in each.shape), 4, 8]):
        # With `size` features or channels: rows, texts, images, signals, volumes.
        for shape in ((3, size), (2, 3, size), (2, size, 8, 8), (2, size, 16), (2, size, 6, 6, 6)):
            yield tuple(torch.randn(shape) for _ in inputs)
    yield tuple(torch.arange(6).reshape(2, 3) for _ in inputs)


def _noted(node: Node) -> Tensor | None:
    """Return a tensor as the node describes it; None where it describes none of known sizes."""
    # "val" is what torch.export and `infer_shapes` note, "tensor_meta" what torch's `ShapeProp` notes.
    value: Any = node.meta.get("val", node.meta.get("tensor_meta"))
    try:
        sizes, dtype = [int(size) for size in value.shape], value.dtype
        return (torch.randn(sizes) if dtype.is_floating_point else torch.ones(sizes)).to(dtype)
    # Nothing is noted, or no tensor; `int()` of a size that depends on values is a RuntimeError.
    except (AttributeError, TypeError, RuntimeError):
        return None
