"""Processor seconds of passes beside those of ``graph.lint()`` and ``recompile()`` on the same graph.

`PYTHONPATH=benchmarks python benchmarks/passes.py 5` makes five runs of each. The time of a pass is that of the whole
call without lint and recompile: snapshot, transform, ledger. Graphs are drawn up node by node, with layers of width 4,
so that what is measured is the work on the graph; ``--models`` captures real architectures instead. Where optimum is
installed (`pip install --no-deps optimum==2.3.0`), its passes stand beside ours on the graphs that they can read.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import importlib.util
import operator
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median, quantiles
from time import process_time
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.fx import Graph, GraphModule, Node

from fxopt_arith import ChangeTrueDivToMulByInverse
from fxopt_core import Transformation, history
from fxopt_core.copying import faithful_copy
from fxopt_core.transaction import Snapshot
from fxopt_linear import FuseBiasInLinear, MergeLinears
from fxopt_norm import FuseBatchNorm1dInLinear, FuseBatchNorm2dInConv2d

WIDTH = 4
FORMS = ("modules", "functions", "aten")
SHARES = (1.0, 0.05, 0.0)
PASSES: dict[str, Callable[[], Transformation]] = {
    "merge-linears": MergeLinears,
    "fuse-bias-in-linear": FuseBiasInLinear,
    "fuse-batch-norm2d-in-conv2d": FuseBatchNorm2dInConv2d,
    "fuse-batch-norm1d-in-linear": FuseBatchNorm1dInLinear,
    "change-true-div-to-mul-by-inverse": ChangeTrueDivToMulByInverse,
}
OPTIMUM = {
    "merge-linears": "MergeLinears",
    "fuse-bias-in-linear": "FuseBiasInLinear",
    "fuse-batch-norm2d-in-conv2d": "FuseBatchNorm2dInConv2d",
}


class Drawing:
    """A graph that is drawn up node by node, in one of the forms that graphs have."""

    def __init__(self, form: str) -> None:
        self.form, self.graph, self.root = form, Graph(), nn.Module()

    def layer(self, module: nn.Module, name: str, x: Node) -> Node:
        """A call of a layer."""
        block, _, key = name.partition(".")
        if block not in self.root._modules:
            self.root.add_module(block, nn.Module())
        self.root._modules[block].add_module(key, module)  # type: ignore[union-attr]  # it was put there
        if self.form == "modules":
            return self.graph.call_module(name, (x,))
        keys = ("weight", "bias") if isinstance(module, (nn.Linear, nn.Conv2d)) else _NORM_KEYS
        tensors = [self.graph.get_attr(f"{name}.{key}") for key in keys]
        if isinstance(module, nn.Linear):
            return self.graph.call_function(
                F.linear if self.form == "functions" else _ATEN.linear.default, (x, *tensors)
            )
        if isinstance(module, nn.Conv2d):
            convolve = torch.conv2d if self.form == "functions" else _ATEN.conv2d.default
            return self.graph.call_function(convolve, (x, *tensors, [1, 1], [0, 0], [1, 1], 1))
        weight, bias, mean, var = tensors
        if self.form == "functions":
            return self.graph.call_function(F.batch_norm, (x, mean, var, weight, bias, False, 0.1, 1e-5))
        return self.graph.call_function(_ATEN.batch_norm.default, (x, weight, bias, mean, var, False, 0.1, 1e-5, True))

    def call(self, name: str, *args: Any) -> Node:
        """A call of an operation without parameters."""
        plain: dict[str, Callable[..., Any]] = {"relu": torch.relu, "add": operator.add, "div": operator.truediv}
        overloads = {"relu": _ATEN.relu.default, "add": _ATEN.add.Tensor, "div": _ATEN.div.Tensor}
        return self.graph.call_function((overloads if self.form == "aten" else plain)[name], args)

    def done(self, result: Any, rank: int) -> GraphModule:
        """The graph module, with shapes."""
        self.graph.output(result)
        value = torch.empty((2, WIDTH, 3, 3)[:rank], device="meta")
        for node in self.graph.nodes:
            if node.op != "output":
                node.meta["val"] = value
        graph_module = GraphModule(self.root.eval(), self.graph)
        graph_module.eval()
        return graph_module


_ATEN = torch.ops.aten
_NORM_KEYS = ("weight", "bias", "running_mean", "running_var")


def drawn(name: str, form: str, nodes: int, share: float, hub: bool) -> GraphModule:
    """A graph for a pass.

    Args:
        name: the pass.
        form: modules, functions or aten.
        nodes: how many nodes it has about.
        share: how many of them belong to sites; the others are activations.
        hub: whether all sites read one value, rather than each the one before.
    """
    drawing = Drawing(form)
    first = x = drawing.graph.placeholder("x")
    results = []
    while len(drawing.graph.nodes) < nodes:
        before = len(drawing.graph.nodes)
        x = _site(drawing, name, first if hub else x, before)
        results.append(x)
        used = len(drawing.graph.nodes) - before
        idle = int(used / share) - used if share else nodes
        for _ in range(min(idle, nodes - len(drawing.graph.nodes))):
            x = drawing.call("relu", x)
    return drawing.done(tuple(results) if hub else x, 4 if "conv" in name else 2)


def _site(drawing: Drawing, name: str, x: Node, number: int) -> Node:
    def linear(key: str) -> Node:
        return drawing.layer(nn.Linear(WIDTH, WIDTH), f"block{number}.{key}", x)

    if name == "merge-linears":
        return drawing.call("add", drawing.call("add", linear("q"), linear("k")), linear("v"))
    if name == "fuse-bias-in-linear":
        return drawing.call("relu", linear("a"))
    if name == "change-true-div-to-mul-by-inverse":
        return drawing.call("relu", drawing.call("div", x, 3.0))
    if name == "fuse-batch-norm1d-in-linear":
        return drawing.layer(nn.BatchNorm1d(WIDTH), f"block{number}.norm", linear("a"))
    y = drawing.layer(nn.Conv2d(WIDTH, WIDTH, 1), f"block{number}.conv", x)
    return drawing.layer(nn.BatchNorm2d(WIDTH), f"block{number}.norm", y)


@dataclass(frozen=True)
class Case:
    """A pass and a graph.

    Attributes:
        name: what to call the graph.
        transformation: the name of the pass.
        make: makes the graph module anew.
        peer: whether optimum's pass of the same name can read it.
    """

    name: str
    transformation: str
    make: Callable[[], GraphModule]
    peer: bool = False


def drawn_cases(sizes: Sequence[int], names: Sequence[str], forms: Sequence[str]) -> list[Case]:
    """Every pass on every form, with many sites, few and none, and with a hub."""
    cases = []
    for size in sizes:
        for name in names:
            for form in forms:
                for share, hub in (*((share, False) for share in SHARES), (1.0, True)):
                    kind = "hub" if hub else {1.0: "all sites", 0.0: "one site"}.get(share, f"{share:.0%} sites")

                    def make(
                        name: str = name, form: str = form, size: int = size, share: float = share, hub: bool = hub
                    ) -> GraphModule:
                        return drawn(name, form, size, share, hub)

                    peer = form == "modules" and name in OPTIMUM
                    cases.append(Case(f"{size} nodes, {form}, {kind}", name, make, peer))
    return cases


def model_cases() -> list[Case]:
    """BERT with 12 layers, Llama with 32, and ResNet-50, captured; all but ResNet-50 narrow."""
    import transformers

    from fxopt_capture import capture

    ids = {"input_ids": torch.ones(2, 8, dtype=torch.long)}
    narrow: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 100}
    bert = transformers.BertModel(transformers.BertConfig(**narrow, num_hidden_layers=12)).eval()
    settings = transformers.LlamaConfig(**narrow, num_hidden_layers=32, num_key_value_heads=2)
    llama = transformers.LlamaForCausalLM(settings).eval()
    resnet = transformers.ResNetModel(transformers.ResNetConfig()).eval()
    found = (
        ("BERT, 12 layers", "merge-linears", capture(bert, kwargs=ids)),
        ("Llama, 32 layers", "merge-linears", capture(llama, kwargs={**ids, "use_cache": False})),
        ("ResNet-50", "fuse-batch-norm2d-in-conv2d", capture(resnet, (torch.randn(2, 3, 64, 64),))),
    )
    cases = []
    for name, transformation, original in found:

        def make(original: GraphModule = original) -> GraphModule:
            return faithful_copy(original)

        cases.append(Case(f"{name}, {len(original.graph.nodes)} nodes", transformation, make))
    return cases


def rows(cases: Sequence[Case], runs: int = 5) -> list[dict[str, Any]]:
    """Seconds of each case; the order is another in every round, and the first round is not counted."""
    found: list[list[dict[str, float]]] = [[] for _ in cases]
    order = list(range(len(cases)))
    for _ in range(runs + 1):
        random.shuffle(order)
        for index in order:
            found[index].append(measured(cases[index]))
    return [_row(case, each[1:]) for case, each in zip(cases, found, strict=True)]


def measured(case: Case) -> dict[str, float]:
    """Seconds of one run of a case."""
    graph_module = case.make()
    found = {"lint_and_recompile": _seconds(graph_module.graph.lint) + _seconds(graph_module.recompile)}
    found["snapshot"] = _seconds(lambda: Snapshot.take(graph_module).close())
    transformation = PASSES[case.transformation]()
    found["pass"] = _seconds(lambda: transformation(graph_module, lint_and_recompile=False))
    found["sites"] = len(history(graph_module)[-1].rewrites)
    if case.peer and importlib.util.find_spec("optimum") is not None:
        module: Any = importlib.import_module("optimum.fx.optimization")
        peer, other = getattr(module, OPTIMUM[case.transformation])(), case.make()
        found["optimum"] = _seconds(lambda: peer(other, lint_and_recompile=False))
    return found


def _seconds(function: Callable[[], object]) -> float:
    gc.collect()
    started = process_time()
    function()
    return process_time() - started


def _row(case: Case, runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    row: dict[str, Any] = {"graph": case.name, "pass_name": case.transformation}
    for key in runs[0]:
        row[key] = median([run[key] for run in runs])
    for key in ("pass", "snapshot"):
        ratios = [run[key] / run["lint_and_recompile"] for run in runs]
        row[f"{key}_ratio"] = median(ratios)
        row[f"{key}_ratio_quartiles"] = (
            tuple(quantiles(ratios, n=4)[::2]) if len(ratios) > 1 else (ratios[0], ratios[0])
        )
    return row


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="?", type=int, default=5, help="of each")
    parser.add_argument("--nodes", nargs="*", type=int, default=[1000, 10_000], help="sizes of the graphs")
    parser.add_argument("--passes", nargs="*", default=list(PASSES), choices=list(PASSES))
    parser.add_argument("--forms", nargs="*", default=FORMS, choices=FORMS)
    parser.add_argument("--models", action="store_true", help="captured models rather than drawn graphs")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    cases = model_cases() if options.models else drawn_cases(options.nodes, options.passes, options.forms)
    print("| pass | graph | sites | lint, recompile in ms | pass, ratio | snapshot, ratio | optimum, ratio |")
    print("|---|---|---|---|---|---|---|")
    for row in rows(cases, options.runs):
        print(shown(row))


def shown(row: dict[str, Any]) -> str:
    """One line: milliseconds, and medians of the ratios with their quartiles."""

    def ratio(key: str) -> str:
        low, high = row[f"{key}_quartiles"]
        return f"{row[key]:.2f} ({low:.2f} to {high:.2f})"

    peer = f"{row['optimum'] / row['lint_and_recompile']:.2f}" if "optimum" in row else "-"
    cells = (row["pass_name"], row["graph"], f"{row['sites']:.0f}", f"{row['lint_and_recompile'] * 1e3:.1f}")
    return f"| {' | '.join((*cells, ratio('pass_ratio'), ratio('snapshot_ratio'), peer))} |"


if __name__ == "__main__":
    main()
