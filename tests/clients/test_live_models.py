"""`torch.compile(model, backend="fxopt")` with the clients of real models: generation, training."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import BY_NAME, DECODER, ENCODER, VOCABULARY
from nightly import mostly_nightly
from torch import nn

import fxopt_compile
from fxopt_capture import capture
from fxopt_core import Record, history, registry

transformers = pytest.importorskip("transformers")

EVERYTHING = "fold-batch-norm,merge-linears,change-true-div-to-mul-by-inverse,cpu-inference"
# Not what export takes out itself (dropouts and other no-ops), and not regions, which may be cut at other operations.
ON_LAYERS = ("merge-", "fuse-batch-norm", "change-true-div", "convert-to-", "pack-")


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """No graph of another test."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    gc.collect()
    yield
    torch._dynamo.reset()


def sites(records: Any) -> Counter[str]:
    """How many sites each pass rewrote."""
    found: Counter[str] = Counter()
    each: Record
    for each in records:
        if each.rewrites and each.pass_name.startswith(ON_LAYERS):
            found[each.pass_name] += len(each.rewrites)
    return found


def live_sites(model: nn.Module) -> Counter[str]:
    """How many sites each pass rewrote in the graphs of a model."""
    return sites(record for graph in fxopt_compile.history(model) for record in graph.records)


@pytest.mark.parametrize(
    "name", mostly_nightly(["Llama", "ResNet", "BERT", "ViT", "T5", "CLIP", "MobileNetV2"], ["Llama", "ResNet"])
)
def test_dynamos_graphs_have_the_sites_that_capture_finds(name: str) -> None:
    """In one graph, with the same results as eager."""
    architecture = BY_NAME[name]
    model, inputs = architecture.build(transformers), architecture.example(2, 9)
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    captured = registry().pipeline(EVERYTHING)(capture(model, (), inputs, dynamic_shapes=architecture.varying()))
    model.compile(backend="fxopt", options={"pipeline": EVERYTHING, "verify": True}, fullgraph=True)
    with torch.no_grad():
        model(**inputs)
    (graph,) = fxopt_compile.history(model)
    assert graph.calls == 1
    assert live_sites(model) == sites(history(captured))
    assert live_sites(model)


# --- Generation


def llama() -> Any:
    """A small decoder."""
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**DECODER)).eval()


def t5() -> Any:
    """A small encoder with decoder."""
    return BY_NAME["T5"].build(transformers)


@pytest.mark.parametrize("make", [llama, pytest.param(t5, marks=pytest.mark.nightly)])
def test_generation_gives_the_tokens_of_eager(make: Any) -> None:
    """With beams, which reorder the cache, and with other weights; dynamo compiles a few times, not for each token."""
    model, tokens = make(), torch.randint(3, VOCABULARY, (2, 5))
    options = {"do_sample": False, "num_beams": 2, "min_new_tokens": 6, "max_new_tokens": 6}

    def generate() -> list[list[int]]:
        found: list[list[int]] = model.generate(tokens, **options).tolist()
        return found

    expected = generate()
    model.compile(backend="fxopt")
    assert generate() == expected
    graphs = fxopt_compile.history(model)
    assert sum(graph.calls for graph in graphs) >= 6
    assert len(graphs) <= 5
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    found = generate()
    assert len(fxopt_compile.history(model)) <= 6
    fxopt_compile.undo(model)
    assert generate() == found


def test_generation_with_a_static_cache() -> None:
    """Whose tensors the graph writes."""
    model, tokens = llama(), torch.randint(3, VOCABULARY, (2, 5))
    options = {"do_sample": False, "max_new_tokens": 4, "cache_implementation": "static", "disable_compile": True}
    expected = model.generate(tokens, **options).tolist()
    model.compile(backend="fxopt")
    assert model.generate(tokens, **options).tolist() == expected
    assert len(fxopt_compile.history(model)) <= 4


@pytest.mark.nightly
def test_a_trainer_trains_and_evaluates(tmp_path: Path) -> None:
    """To the losses of a model that is not compiled."""
    pytest.importorskip("accelerate")

    def losses(compiles: bool) -> tuple[float, float]:
        torch.manual_seed(0)
        model = transformers.BertForSequenceClassification(transformers.BertConfig(**ENCODER))
        if compiles:
            model.compile(backend="fxopt")
        rows = [{"input_ids": torch.arange(3, 9), "labels": torch.tensor(place % 2)} for place in range(8)]
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=3, per_device_train_batch_size=4, report_to=[], use_cpu=True, save_strategy="no"
        )
        trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows)
        return trainer.train().training_loss, trainer.evaluate()["eval_loss"]

    assert losses(compiles=True) == pytest.approx(losses(compiles=False), rel=1e-4)
