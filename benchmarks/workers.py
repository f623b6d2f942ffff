"""How throughput and memory grow with workers: `python -m benchmarks.workers FOLDER`, as docs/clusters.md quotes.

Three processes hold the folder open: two with a thread, one with two. The first, the first two, and the third encode
the same texts in turns that are shuffled in each round, so that the machine's other work affects all alike.
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import re
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from time import perf_counter, process_time

from transformers import AutoTokenizer

import fxopt

TURNS = {"1 worker, 1 thread": (0,), "2 workers, 1 thread each": (0, 1), "1 worker, 2 threads": (2,)}


def worker(folder: str, threads: int, pipe: Connection) -> None:
    """Answer texts with the processor seconds that they took, and an empty list with the memory held, in MB."""
    encoder = fxopt.BatchEncoder(folder, threads=threads)
    encoder.encode(["the first call", "prepares more than others"])
    pipe.send(None)
    while (texts := pipe.recv()) is not None:
        start = process_time()
        if texts:
            encoder.encode(texts)
            pipe.send(process_time() - start)
        else:
            found = re.findall(
                r"^(Rss|Pss|Private_\w+): +(\d+)", Path("/proc/self/smaps_rollup").read_text(), re.MULTILINE
            )
            pipe.send({name: int(size) // 1024 for name, size in found})


def main() -> None:
    """Measure, and print a line for each turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--texts", type=int, default=256)
    parser.add_argument("--words", type=int, default=30, help="on average")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    draw = random.Random(0)
    words = re.findall("[a-zA-Z]+", Path(__file__).parents[1].joinpath("docs/decisions.md").read_text(encoding="utf-8"))
    texts = [" ".join(draw.choices(words, k=draw.randint(1, 2 * options.words))) for _ in range(options.texts)]

    tokens = AutoTokenizer.from_pretrained(options.folder)(texts)["input_ids"]
    characters, count = (sum(map(len, each)) // len(texts) for each in (texts, tokens))
    print(f"{len(texts)} texts of {characters} characters and {count} tokens")

    context = multiprocessing.get_context("spawn")
    pipes = []
    for threads in (1, 1, 2):
        here, there = context.Pipe()
        context.Process(target=worker, args=(options.folder, threads, there), daemon=True).start()
        here.recv()
        pipes.append(here)
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in TURNS}
    for _ in range(options.rounds):
        for name in draw.sample([*TURNS], len(TURNS)):
            chosen = [pipes[index] for index in TURNS[name]]
            start = perf_counter()
            for place, pipe in enumerate(chosen):
                pipe.send(texts[place :: len(chosen)])
            busy = sum(pipe.recv() for pipe in chosen)
            seconds[name].append((perf_counter() - start, busy))
    first = seconds["1 worker, 1 thread"]
    for name, found in seconds.items():
        ratio = median(one / other for (one, _), (other, _) in zip(first, found, strict=True))
        wall, busy = (median(values) for values in zip(*found, strict=True))
        rates = f"{options.texts / wall:.0f} texts a second, {options.texts / busy:.0f} a processor second"
        print(f"{name}: {rates}, {ratio:.2f} times as many as 1 worker")
    for pipe in pipes:
        pipe.send([])
        print(f"MB of a worker, among three: {pipe.recv()}")
    for pipe in pipes:
        pipe.send(None)


if __name__ == "__main__":
    main()
