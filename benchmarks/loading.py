"""Seconds and memory from a checkpoint on disk to a merged model: streamed into it, beside load, then merge."""

from __future__ import annotations

import json
import random
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.peak_memory import Peak, peak_of
from benchmarks.peers import peer
from benchmarks.suite import Absent, Measured, Row, Settings, Table
from fxopt_capture import capture
from fxopt_checkpoints import load_checkpoint
from fxopt_linear import MergeLinears

GIGABYTES = 2.0
COLUMNS = ("way", "seconds", "times as long as streamed", "of these loading and merging", "peak / model")
TEXT = """A Llama of {gigabytes:.2g} GB in shards of safetensors, from disk to a merged model that can be called; each \
way in a process of its own, in another order in each of {rounds} rounds. Seconds are those of building, capturing, \
merging and loading, without imports; memory is the peak of the process beyond what it held after its imports. Files \
stay in the page cache, which is the same for all. Streaming merges a model without weights, and reads each tensor to \
its place."""
Lap = Callable[[], None]
_LAYER, _EMBEDDINGS = 45_100_000, 131_000_000
"""Parameters of a layer, and of the embeddings, at the width of TinyLlama."""
_WIDE = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 32, "num_key_value_heads": 4}
_SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}


def tables(settings: Settings) -> Iterator[Table]:
    """A table for each dtype."""
    missing = next((found for name in ("transformers", "safetensors") if isinstance(found := peer(name), Absent)), None)
    for dtype in ("float32",) if settings.quick else ("float32", "bfloat16"):
        title = f"From disk to a merged model, {dtype}"
        if missing is not None:
            yield Table(title, COLUMNS, (Row("all", (missing,) * 4),))
            continue
        with tempfile.TemporaryDirectory() as folder:
            size = 4 if dtype == "float32" else 2
            layers = 1 if settings.quick else max(1, round((GIGABYTES * 1e9 / size - _EMBEDDINGS) / _LAYER))
            write(folder, dtype, layers, small=settings.quick)
            yield measured(title, folder, settings)


def measured(title: str, folder: str, settings: Settings) -> Table:
    """All ways to load from one folder."""
    rounds, drawn = settings.fewer_rounds(1 if settings.quick else 5), random.Random(settings.seed)
    found: dict[str, list[Peak]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        for way in drawn.sample(list(WAYS), len(WAYS)):
            found[way].append(peak_of(way_from, way, folder, threads=settings.threads))
    streamed_seconds = [peak.seconds for peak in found["streamed"]]
    rows = []
    for way, peaks in found.items():
        told = [json.loads(str(peak.result)) for peak in peaks]
        seconds = [peak.seconds for peak in peaks]
        sizes = [(peak.highest - peak.before) / each["size"] for peak, each in zip(peaks, told, strict=True)]
        loading = Measured.of([each["loading"] for each in told])
        ratio = Measured.ratio(seconds, streamed_seconds)
        rows.append(Row(way, (Measured.of(seconds), ratio, loading, Measured.of(sizes, "x"))))
    gigabytes = median(each["size"] for each in told) / 1e9
    return Table(title, COLUMNS, tuple(rows), TEXT.format(gigabytes=gigabytes, rounds=rounds))


def write(folder: str, dtype: str, layers: int, *, small: bool) -> None:
    """Write the checkpoint, in shards."""
    transformers = peer("transformers")
    sizes: dict[str, int] = {**(_SMALL if small else _WIDE), "vocab_size": 50 if small else 32000}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(
            transformers.LlamaConfig(**sizes, num_hidden_layers=layers, use_cache=False)
        )
    model = model.to(getattr(torch, dtype)).to_empty(device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.02, 0.02)
    model.save_pretrained(folder, max_shard_size="20KB" if small else "500MB")


def way_from(way: str, folder: str) -> Callable[[], str]:
    """Import, and load a small model, so that one-time costs are not measured; return the work."""
    transformers = peer("transformers")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    peer("safetensors.torch")
    with torch.device("meta"):
        small = transformers.LlamaConfig(**_SMALL, num_hidden_layers=1, vocab_size=50, use_cache=False)
        merging_of(transformers.LlamaForCausalLM(small).eval())()

    def work() -> str:
        times: list[float] = []
        graph_module = WAYS[way](Path(folder), lambda: times.append(perf_counter()))
        tensors = [*graph_module.parameters(), *graph_module.buffers()]
        if any(tensor.is_meta for tensor in tensors):
            raise RuntimeError(f"{way} left tensors on the meta device")
        loading = sum(end - begin for begin, end in zip(times[::2], times[1::2], strict=True))
        size = sum(tensor.numel() * tensor.element_size() for tensor in graph_module.parameters())
        return json.dumps({"loading": loading, "size": size})

    return work


def merging_of(model: Any) -> Callable[[], Any]:
    """The pass that merges a capture of a model."""
    graph_module = capture(model, kwargs={"input_ids": torch.ones(2, 8, dtype=torch.int64)})
    return lambda: MergeLinears()(graph_module)


def streamed(folder: Path, lap: Lap) -> Any:
    """Build, capture and merge on meta, then stream."""
    transformers = peer("transformers")
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).eval()
    graph_module = merging_of(model)()
    lap()
    load_checkpoint(graph_module, folder)
    lap()
    return graph_module


def from_pretrained(folder: Path, lap: Lap) -> Any:
    """The loader of transformers, then capture and merge."""
    lap()
    model = peer("transformers").AutoModelForCausalLM.from_pretrained(folder).eval()
    lap()
    return merged_late(model, lap)


def load_file(folder: Path, lap: Lap) -> Any:
    """Build with random weights, load all files and then the model, then capture and merge."""
    transformers = peer("transformers")
    lap()
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder)).eval()
    state_dict: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state_dict |= peer("safetensors.torch").load_file(file)
    model.load_state_dict(state_dict)
    del state_dict
    lap()
    return merged_late(model, lap)


def merged_late(model: Any, lap: Lap) -> Any:
    """Capture, and then merge."""
    merge = merging_of(model)
    del model
    lap()
    graph_module = merge()
    lap()
    return graph_module


WAYS: Mapping[str, Callable[[Path, Lap], Any]] = {
    "streamed": streamed,
    "`from_pretrained`, then merge": from_pretrained,
    "`load_file`, then merge": load_file,
}
