"""Graph modules, records and reports as data for scripts."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from typing import Any

from torch.fx import GraphModule

from fxopt_core import iter_nodes
from fxopt_tools import OutputReport, Size, VerificationReport

_OUTPUT = [
    *("path", "passed", "problem", "excused", "unseen", "shape"),
    *("max_absolute_error", "max_relative_error", "sqnr_db", "original_sqnr_db", "least_sqnr_db", "cosine"),
]


def size_data(graph_module: GraphModule) -> dict[str, int]:
    """Return the numbers of nodes, modules and parameters of a graph module, and the bytes of its parameters."""
    return asdict(Size.of(graph_module))


def operations_of(graph_module: GraphModule) -> Counter[str]:
    """Return how many operations of each kind there are: layers by class, then functions and methods by name.

    >>> import torch
    >>> operations_of(torch.fx.symbolic_trace(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())))
    Counter({'Linear': 1, 'ReLU': 1})
    """
    layers, functions = Counter[str](), Counter[str]()
    for node in iter_nodes(graph_module.graph):
        if node.op == "call_module":
            layers[type(graph_module.get_submodule(str(node.target))).__name__] += 1
        elif node.op in ("call_function", "call_method"):
            # All overloads of an operator count as one kind: `add.Tensor` and `add.Scalar` as `add`.
            target: Any = getattr(node.target, "overloadpacket", node.target)
            functions[getattr(target, "__name__", str(target))] += 1
    return layers + functions


def report_data(report: VerificationReport) -> dict[str, Any]:
    """Return the result of verifying."""
    return {
        "passed": report.passed,
        "outputs": [_output_data(output) for output in report.outputs],
        "notes": report.notes,
    }


def _output_data(output: OutputReport) -> dict[str, Any]:
    return {
        "input": output.number,
        "dtype": None if output.dtype is None else str(output.dtype).removeprefix("torch."),
        **{name: getattr(output, name) for name in _OUTPUT},
        **{name: getattr(output.tolerance, name, None) for name in ("rtol", "atol")},
    }
