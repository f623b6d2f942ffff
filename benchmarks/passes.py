"""Seconds of passes on large graphs, beside those of checking a graph and generating its code, and beside optimum's."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from time import process_time
from typing import Any

import torch
from torch.fx import GraphModule

from benchmarks.drawing import drawn
from benchmarks.peers import optimum, peer
from benchmarks.suite import Absent, Cell, Measured, Row, Settings, Table
from fxopt_capture import capture
from fxopt_core import Snapshot, faithful_copy, history, registry

OPTIMUM = {
    "merge-linears": "MergeLinears",
    "fuse-bias-in-linear": "FuseBiasInLinear",
    "fuse-batch-norm2d-in-conv2d": "FuseBatchNorm2dInConv2d",
    "change-true-div-to-mul-by-inverse": "ChangeTrueDivToMulByInverse",
}
PASSES = (*OPTIMUM, "fuse-batch-norm1d-in-linear")
COLUMNS = (
    "graph",
    "sites",
    "lint and recompile",
    "the pass",
    "pass / lint and recompile",
    "snapshot / lint and recompile",
    "optimum",
    "optimum / fxopt",
)
TEXT = """CPU time of a pass with its checks, snapshot and records, without lint and recompile. The snapshot is also \
measured alone. Layers have width 4, so the graph dominates. In a **hub**, all sites read one value. optimum reads \
graphs of modules only. {rounds} rounds, fewer on large graphs."""
MODELS_TEXT = """Captured models, measured in the same way; all but ResNet-50 have narrow layers."""


@dataclass(frozen=True)
class Case:
    """A pass and a graph.

    Attributes:
        label: the name of the graph.
        transformation: the name of the pass.
        make: makes the graph module anew.
        theirs: whether optimum has the pass, and can read the graph.
        rounds: the most rounds, since making large graphs takes long.
    """

    label: str
    transformation: str
    make: Callable[[], GraphModule]
    theirs: bool = False
    rounds: int = 5


def tables(settings: Settings) -> Iterator[Table]:
    """A table for each pass on generated graphs, then one on captured models."""
    torch.set_num_threads(1)
    text = TEXT.format(rounds=settings.fewer_rounds(5))
    for name in PASSES:
        measured(drawn_cases(name, quick=True)[0], random.Random(settings.seed))  # one-time costs
        rows = [row_of(case, settings) for case in drawn_cases(name, quick=settings.quick)]
        yield Table(name, COLUMNS, tuple(rows), text)
    models = () if settings.quick else model_cases()
    if models:
        yield Table("On models", COLUMNS, tuple(row_of(case, settings) for case in models), MODELS_TEXT)


def drawn_cases(name: str, *, quick: bool = False) -> list[Case]:
    """Many sites at three sizes; at the middle one also another form of graph, a hub, and a single site."""
    small, middle, large = (30, 60, 90) if quick else (1_000, 10_000, 50_000)
    kinds = (
        (small, "modules", 1.0, False),
        (middle, "modules", 1.0, False),
        (large, "modules", 1.0, False),
        (middle, "aten", 1.0, False),
        (middle, "modules", 1.0, True),
        (middle, "modules", 0.0, False),
    )
    cases = []
    for nodes, form, share, hub in kinds:
        kind = "a hub" if hub else "many sites" if share else "one site"
        # On a hub, optimum takes as long as all the rest.
        theirs = name in OPTIMUM and form == "modules" and not hub
        make = partial(drawn, name, form, nodes, share, hub)
        cases.append(Case(f"{nodes} nodes, {form}, {kind}", name, make, theirs, rounds=2 if nodes == large else 5))
    return cases


def model_cases() -> list[Case]:
    """BERT with 12 layers, Llama with 32, and ResNet-50."""
    transformers = peer("transformers")
    if isinstance(transformers, Absent):
        return []
    ids = {"input_ids": torch.ones(2, 8, dtype=torch.long)}
    narrow: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 100}
    bert = transformers.BertModel(transformers.BertConfig(**narrow, num_hidden_layers=12)).eval()
    options = transformers.LlamaConfig(**narrow, num_hidden_layers=32, num_key_value_heads=2)
    llama = transformers.LlamaForCausalLM(options).eval()
    resnet = transformers.ResNetModel(transformers.ResNetConfig()).eval()
    found = (
        ("BERT, 12 layers", "merge-linears", capture(bert, kwargs=ids)),
        ("Llama, 32 layers", "merge-linears", capture(llama, kwargs={**ids, "use_cache": False})),
        ("ResNet-50", "fuse-batch-norm2d-in-conv2d", capture(resnet, (torch.randn(2, 3, 64, 64),))),
    )
    return [
        Case(f"{name}, {len(original.graph.nodes)} nodes, {transformation}", transformation, partial(copied, original))
        for name, transformation, original in found
    ]


def copied(original: GraphModule) -> GraphModule:
    """A copy to rewrite."""
    return faithful_copy(original)


def row_of(case: Case, settings: Settings) -> Row:
    """One graph, in rounds."""
    drawn_order = random.Random(settings.seed)
    found = [measured(case, drawn_order) for _ in range(settings.fewer_rounds(case.rounds))]
    times = {key: [each[key] for each in found] for key in found[0]}
    checks, ours = times["checks"], times["fxopt"]
    theirs: tuple[Cell, Cell] = ("-", "-")
    if "optimum" in times:
        theirs = (Measured.of(times["optimum"]), Measured.ratio(times["optimum"], ours))
    elif case.theirs:
        theirs = (optimum(), optimum())
    ratios = (Measured.ratio(ours, checks), Measured.ratio(times["snapshot"], checks))
    return Row(case.label, (int(times["sites"][0]), Measured.of(checks), Measured.of(ours), *ratios, *theirs))


def measured(case: Case, order: random.Random) -> dict[str, float]:
    """One round: who is first, fxopt or optimum, is drawn."""
    kinds: Sequence[Callable[[Case], dict[str, float]]] = [measured_ours]
    if case.theirs and not isinstance(optimum(), Absent):
        kinds = order.sample([measured_ours, measured_theirs], 2)
    found: dict[str, float] = {}
    for kind in kinds:
        found |= kind(case)
    return found


def measured_ours(case: Case) -> dict[str, float]:
    """Lint and recompile, a snapshot alone, and the pass."""
    graph_module, transformation = case.make(), registry().create(case.transformation)
    checks = seconds(graph_module.graph.lint) + seconds(graph_module.recompile)
    snapshot = seconds(partial(Snapshot, graph_module))
    ours = seconds(lambda: transformation(graph_module, lint_and_recompile=False))
    sites = len(history(graph_module)[-1].rewrites)
    return {"checks": checks, "snapshot": snapshot, "fxopt": ours, "sites": sites}


def measured_theirs(case: Case) -> dict[str, float]:
    """optimum's pass on a graph of its own."""
    graph_module, transformation = case.make(), getattr(optimum(), OPTIMUM[case.transformation])()
    return {"optimum": seconds(lambda: transformation(graph_module, lint_and_recompile=False))}


def seconds(task: Callable[[], object]) -> float:
    """Processor seconds of a task."""
    gc.collect()
    started = process_time()
    task()
    return process_time() - started
