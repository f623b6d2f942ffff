"""Embed the lines of a text file with an optimized encoder, on as many processes as torchrun starts.

    torchrun --standalone --nproc-per-node 4 embed.py sentence-transformers/all-MiniLM-L6-v2 lines.txt vectors.npy

The result is an array of (lines, width) in float32: the mean over the tokens of a line, of length 1. Each process takes
every n-th part of the file and writes a file for each part, so that a job that was stopped goes on where it was, also
with another number of processes. On a cluster the script runs as it is, with a folder that all nodes see:
``torchrun --nnodes 8 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 embed.py ...``.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as distributed
from torch import Tensor
from transformers import AutoModel, AutoTokenizer

import fxopt

Encoder = Callable[[Sequence[str]], Tensor]


def encoder(name: str, longest: int) -> Encoder:
    """Return a function from sentences to vectors: an optimized model, captured once for all lengths."""
    tokenizer = AutoTokenizer.from_pretrained(name)
    model = AutoModel.from_pretrained(name).eval()

    def tokens(sentences: Sequence[str]) -> dict[str, Tensor]:
        found = tokenizer([*sentences], padding=True, truncation=True, max_length=longest, return_tensors="pt")
        return {key: found[key] for key in ("input_ids", "attention_mask")}

    example = tokens(["Capture one graph", "for sentences of all lengths"])
    graph_module = fxopt.optimize(model, kwargs=example)

    def encode(sentences: Sequence[str]) -> Tensor:
        inputs = tokens(sentences)
        mask = inputs["attention_mask"].unsqueeze(-1)
        with torch.inference_mode():
            states = graph_module(**inputs).last_hidden_state
            return torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)

    return encode


def in_batches(encode: Encoder, sentences: Sequence[str], batch: int) -> Tensor:
    """Encode sentences of like length together, and return the vectors in the order of the sentences."""
    order = sorted(range(len(sentences)), key=lambda place: len(sentences[place]))
    batches = [order[start : start + batch] for start in range(0, len(order), batch)]
    vectors = torch.cat([encode([sentences[place] for place in places]) for places in batches])
    return torch.empty_like(vectors).index_copy_(0, torch.tensor(order), vectors)


def write(path: Path, vectors: Any) -> None:
    """Write an array under another name first, so that a part that has its name is complete."""
    unfinished = path.with_suffix(f".{os.getpid()}.tmp")
    with unfinished.open("wb") as file:
        numpy.save(file, vectors)
    unfinished.replace(path)


def show(done: int, total: int) -> None:
    """Draw the bar anew."""
    filled = 40 * done // total
    print(f"\r[{'#' * filled}{'.' * (40 - filled)}] {done}/{total} parts", end="", file=sys.stderr, flush=True)


def join(parts: Sequence[Path], output: Path) -> None:
    """Put the parts together in one file, which is never in memory as a whole."""
    arrays = [numpy.load(part, mmap_mode="r") for part in parts]
    unfinished = output.with_name(f"{output.name}.tmp")
    shape = (sum(len(array) for array in arrays), arrays[0].shape[1])
    joined = numpy.lib.format.open_memmap(unfinished, mode="w+", dtype=numpy.float32, shape=shape)
    numpy.concatenate(arrays, out=joined)
    joined.flush()
    unfinished.replace(output)


def main() -> None:
    parser = argparse.ArgumentParser(description="Embed the lines of a text file.")
    parser.add_argument("model", help="name or folder of a Hugging Face encoder")
    parser.add_argument("lines", type=Path, help="text file, one sentence a line")
    parser.add_argument("output", type=Path, help="the .npy file to write")
    parser.add_argument("--batch", type=int, default=32, help="sentences in one call of the model")
    parser.add_argument("--part", type=int, default=4096, help="lines in one part: what a stopped job has to do again")
    parser.add_argument("--longest", type=int, default=256, help="tokens at most; what is longer is cut off")
    options = parser.parse_args()
    if "RANK" in os.environ:  # as torchrun sets it
        distributed.init_process_group("gloo")
    here = distributed.is_initialized()
    rank, count = (distributed.get_rank(), distributed.get_world_size()) if here else (0, 1)

    text = options.lines.read_bytes()
    sentences = text.decode().splitlines()
    if not sentences:
        parser.error(f"{options.lines} has no lines")
    settings = f"{options.model} {options.part} {options.longest}".encode()
    folder = options.output.with_name(f"{options.output.name}.parts-{hashlib.sha256(settings + text).hexdigest()[:12]}")
    folder.mkdir(parents=True, exist_ok=True)
    parts = [folder / f"{start:012d}.npy" for start in range(0, len(sentences), options.part)]
    missing = [number for number, part in enumerate(parts) if number % count == rank and not part.exists()]
    encode = encoder(options.model, options.longest) if missing else None
    for number in missing:
        if encode is not None:
            of_part = sentences[number * options.part :][: options.part]
            write(parts[number], in_batches(encode, of_part, options.batch).numpy())
        if rank == 0:
            show(sum(part.exists() for part in parts), len(parts))
    if here:
        distributed.monitored_barrier()  # names the process that did not come
    if rank == 0:
        show(len(parts), len(parts))
        print(file=sys.stderr)
        join(parts, options.output)
        shutil.rmtree(folder)
    if here:
        distributed.destroy_process_group()


if __name__ == "__main__":
    main()
