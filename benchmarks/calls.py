"""What a call costs beside the model's computation: sorting and checking arguments, dynamo's guards, live weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.fx import GraphModule
from torch.fx.node import map_arg

import fxopt
from benchmarks.encoders import Regime, bert, minilm
from benchmarks.suite import Absent, Measured, Row, Settings, Table, Task, set_threads, shuffled_rounds
from fxopt_compile.backend import LiveGraph
from fxopt_compile.settings import Settings as LiveSettings
from fxopt_core import iter_nodes

TEXT = """Calls of {title} after `cpu-inference` that compute nothing: the graph module's nodes but for its checks are \
taken out, and the live model's graph gives results that are there. A live model has {weights} weights that passes \
read, among {inputs} inputs. 1 thread."""
REPEATED = {"return_dict": True, "output_attentions": False, "output_hidden_states": False}
Run = Callable[..., Any]


def tables(settings: Settings) -> Iterator[Table]:
    """One table: graph modules and live models."""
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_attention_heads": 2, "num_hidden_layers": 1}
    regime = bert("a small BERT", 1, 8, **sizes) if settings.quick else minilm(1, 1, 16)
    if isinstance(regime, Absent):
        yield Table("Calls", ("", "one call"), (Row("all", (regime,)),))
        return
    set_threads(1)
    try:
        yield compared(regime, settings)
    finally:
        set_threads(settings.threads)


def compared(regime: Regime, settings: Settings) -> Table:
    """All ways to call a model, in the same rounds."""
    inputs = dict(regime.inputs)
    tasks = graph_module_tasks(regime, inputs)
    with torch.no_grad():
        live = Live()
        tasks["live model, dynamo's guards alone"] = live.task(regime.model, inputs, fxopt=False)
        tasks["live model, with fxopt"] = live.task(regime.model, inputs, fxopt=True)
        tasks["of which fxopt"] = live.alone
    seconds = shuffled_rounds(tasks, settings.rounds, clock=settings.clock, seed=settings.seed)
    rows = tuple(Row(name, (Measured.of(found),)) for name, found in seconds.items())
    text = TEXT.format(title=regime.title, weights=live.weights, inputs=live.inputs)
    return Table("Calls that compute nothing", ("", "one call"), rows, text)


def graph_module_tasks(regime: Regime, inputs: dict[str, Any]) -> dict[str, Task]:
    """A module that does nothing, and the graph module called in three ways."""
    captured = fxopt.optimize(regime.model, kwargs=dict(regime.example), pipeline="cpu-inference")
    checks = hollow(captured)
    names = [node.name for node in iter_nodes(captured.graph) if node.op == "placeholder"]
    by_position = [inputs[name] for name in names]
    nothing = nn.Identity()
    return {
        "`nn.Identity`": partial(nothing, by_position[0]),
        "graph module, by position": partial(checks, *by_position),
        "graph module, by keyword": partial(checks, **inputs),
        f"graph module, by keyword, with {', '.join(f'`{name}`' for name in REPEATED)}": partial(
            checks, **inputs, **REPEATED
        ),
    }


def hollow(graph_module: GraphModule) -> GraphModule:
    """Return a copy of a captured graph module that checks its inputs, and returns one of them for each output."""
    copied = copy.deepcopy(graph_module)
    nodes = list(iter_nodes(copied.graph))
    output, given = nodes[-1], nodes[0]
    output.args = map_arg(output.args, lambda _: given)
    checks = [node for node in nodes if node.target == "_guards_fn"]
    for node in reversed(nodes):
        if not (node.users or node.op in ("placeholder", "output") or node in checks):
            copied.graph.erase_node(node)
    copied.recompile()
    return copied


class Live:
    """A compiled model whose graph returns ready-made results.

    Attributes:
        alone: calls only what fxopt runs before a rewritten graph.
        weights: how many weights are compared at each call.
        inputs: how many inputs the graph has.
    """

    alone: Task
    weights: int
    inputs: int

    def task(self, model: nn.Module, inputs: dict[str, Any], *, fxopt: bool) -> Task:
        """Compile, with fxopt's checks or without them."""
        torch.compiler.reset()

        def backend(graph_module: GraphModule, values: Sequence[Any]) -> Run:
            results = graph_module(*values)
            if not fxopt:
                return lambda *_: results
            graph = LiveGraph(graph_module, values, LiveSettings("cpu-inference"))
            run = graph.compiled(values)
            (binding,) = graph._bindings
            binding.call = lambda *_: results
            self.alone, self.weights, self.inputs = partial(run, *values), len(binding._weights), len(values)
            return run

        compiled = torch.compile(copy.deepcopy(model), backend=backend)
        compiled(**inputs)
        return lambda: compiled(**inputs)
