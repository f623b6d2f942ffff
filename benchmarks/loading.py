"""Seconds and memory from a checkpoint on disk to a merged model: streamed into it, beside load, then merge.

`python benchmarks/loading.py --gigabytes 2 --rounds 3` writes a Llama-like checkpoint in shards once, and runs each way
in a process of its own, in another order in every round. Times are those of building, capturing, merging and loading,
without imports; memory is the peak of the process over what it had after its imports. The files stay in the page cache,
which is the same for all.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from time import perf_counter, process_time
from typing import Any

WAYS = ("streamed", "from_pretrained, then merge", "load_file, then merge")
_LAYER = 45_100_000  # parameters of one layer
_EMBEDDINGS = 131_000_000


@dataclass(frozen=True)
class Row:
    """One way, measured.

    Attributes:
        way: its name.
        dtype: that of the weights.
        seconds: from the start to a model that can be called, round by round.
        loading: those of loading, and of merging what was loaded, round by round.
        processor: processor seconds of the same, which say more on a machine with other work.
        memory: peak over the size of the model, round by round.
    """

    way: str
    dtype: str
    seconds: tuple[float, ...]
    loading: tuple[float, ...]
    processor: tuple[float, ...]
    memory: tuple[float, ...]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--one", nargs=2, metavar=("WAY", "FOLDER"), help="measure one way in this process")
    options = parser.parse_args(arguments)
    if options.one:
        print(json.dumps(measured_here(*options.one, threads=options.threads)))
        return
    rows = measured(options.gigabytes, options.rounds, options.dtype, options.threads)
    print("| way | seconds | of these loading and merging | processor seconds of these | peak / model |")
    print("|---|---|---|---|---|")
    for row in rows:
        cells = (row.seconds, row.loading, row.processor, row.memory)
        print(f"| {row.way} | {' | '.join(map(_shown, cells))} |")


def measured(gigabytes: float = 2.0, rounds: int = 3, dtype: str = "float32", threads: int = 2) -> list[Row]:
    """Measure all ways.

    Args:
        gigabytes: size of the model.
        rounds: how often each way is run.
        dtype: "float32" or "bfloat16".
        threads: of torch.
    """
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, __file__, "--one", "write", folder], check=True, env=_written(gigabytes, dtype))
        for _ in range(rounds):
            for way in random.sample(WAYS, len(WAYS)):
                command = [sys.executable, __file__, "--threads", str(threads), "--one", way, folder]
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                found[way].append(json.loads(output.splitlines()[-1]))
    names = ("seconds", "loading", "processor", "memory")
    return [Row(way, dtype, *(tuple(run[name] for run in runs) for name in names)) for way, runs in found.items()]


def _written(gigabytes: float, dtype: str) -> dict[str, str]:
    size = {"float32": 4, "bfloat16": 2}[dtype]
    layers = max(1, round((gigabytes * 1e9 / size - _EMBEDDINGS) / _LAYER))
    return os.environ | {"LOADING_LAYERS": str(layers), "LOADING_DTYPE": dtype}


def measured_here(way: str, folder: str, *, threads: int) -> dict[str, float]:
    """Run one way in this process, and return its seconds and its memory."""
    import torch
    import transformers

    torch.set_num_threads(threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    if way == "write":
        write(folder)
        return {}
    prepare()
    before, started = _peak(), perf_counter()
    laps: list[tuple[float, float]] = []
    graph_module = _WAYS[way](Path(folder), lambda: laps.append((perf_counter(), process_time())))
    ended = perf_counter()
    size = sum(tensor.numel() * tensor.element_size() for tensor in graph_module.parameters())
    if any(tensor.is_meta for tensor in (*graph_module.parameters(), *graph_module.buffers())):
        raise RuntimeError(f"{way} left tensors on the meta device")
    return {
        "seconds": ended - started,
        "loading": sum(end[0] - begin[0] for begin, end in zip(laps[::2], laps[1::2], strict=True)),
        "processor": sum(end[1] - begin[1] for begin, end in zip(laps[::2], laps[1::2], strict=True)),
        "memory": (_peak() - before) / size,
    }


def config() -> Any:
    """A Llama of the width of TinyLlama, with as many layers as the environment says."""
    from transformers import LlamaConfig

    return LlamaConfig(
        hidden_size=2048,
        intermediate_size=5632,
        num_attention_heads=32,
        num_key_value_heads=4,
        num_hidden_layers=int(os.environ["LOADING_LAYERS"]),
        vocab_size=32000,
        use_cache=False,
    )


def write(folder: str) -> None:
    """Write the checkpoint, in shards."""
    import torch
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    dtype = getattr(torch, os.environ["LOADING_DTYPE"])
    with torch.device("meta"):
        model = LlamaForCausalLM(config())
    model = model.to(dtype).to_empty(device="cpu")
    for parameter in model.parameters():
        torch.nn.init.uniform_(parameter, -0.02, 0.02)
    model.save_pretrained(folder, max_shard_size="500MB")


def prepare() -> None:
    """Import, and go the way of a small model, so that what is made once for all is not measured."""
    import safetensors.torch  # noqa: F401
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from fxopt_capture import load_checkpoint  # noqa: F401

    small = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_attention_heads=4, num_hidden_layers=1, vocab_size=50, use_cache=False
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(small).eval()
    _merged(model)()


def _merged(model: Any) -> Any:
    import torch

    from fxopt_capture import capture
    from fxopt_linear import MergeLinears

    graph_module = capture(model, kwargs={"input_ids": torch.ones(2, 8, dtype=torch.int64)})
    return lambda: MergeLinears()(graph_module)


def _on_meta(folder: Path) -> Any:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()


def streamed(folder: Path, lap: Callable[[], None]) -> Any:
    """Build, capture and merge on meta, then stream."""
    from fxopt_capture import load_checkpoint

    graph_module = _merged(_on_meta(folder))()
    lap()
    load_checkpoint(graph_module, folder)
    lap()
    return graph_module


def _from_pretrained(folder: Path, lap: Callable[[], None]) -> Any:
    from transformers import AutoModelForCausalLM

    lap()
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    lap()
    return _merged_late(model, lap)


def _load_file(folder: Path, lap: Callable[[], None]) -> Any:
    from safetensors.torch import load_file
    from transformers import AutoConfig, AutoModelForCausalLM

    lap()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).eval()
    state_dict: dict[str, Any] = {}
    for file in sorted(folder.glob("*.safetensors")):
        state_dict |= load_file(file)
    model.load_state_dict(state_dict)
    del state_dict
    lap()
    return _merged_late(model, lap)


def _merged_late(model: Any, lap: Callable[[], None]) -> Any:
    merge = _merged(model)
    del model
    lap()
    graph_module = merge()
    lap()
    return graph_module


_WAYS: dict[str, Callable[[Path, Callable[[], None]], Any]] = {
    "streamed": streamed,
    "from_pretrained, then merge": _from_pretrained,
    "load_file, then merge": _load_file,
}


def _peak() -> int:
    """Peak of resident memory of this process, in bytes."""
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _shown(values: Sequence[float]) -> str:
    return f"{median(values):.2f} ({min(values):.2f} to {max(values):.2f})"


if __name__ == "__main__":
    main()
