"""Embed a column of Parquet files with Ray Data, in as many workers as the cluster has room for.

    fxopt optimize sentence-transformers/all-MiniLM-L6-v2 -o minilm-fast
    python embed_with_ray.py minilm-fast texts vectors --workers 4

Ray reads, retries and writes. Each worker has one core and opens the folder once; every node has to find it under the
same path. Keep a core or two for Ray's readers and writers, or nothing moves.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import ray

import fxopt


def main() -> None:
    parser = argparse.ArgumentParser(description="Embed a column of Parquet files with Ray Data.")
    parser.add_argument("folder", type=Path, help="what `fxopt optimize FOLDER -o OUT` wrote")
    parser.add_argument("source", help="Parquet files with the texts: a folder, or an address that Ray reads")
    parser.add_argument("target", help="where the same rows go, with the vectors")
    parser.add_argument("--column", default="text", help="the column with the texts")
    parser.add_argument("--workers", type=int, default=2, help="processes with a core each")
    parser.add_argument(
        "--block", type=int, default=4096, help="most rows in one task: what a killed worker does again"
    )
    options = parser.parse_args()

    rows = ray.data.read_parquet(options.source)
    block = min(options.block, -(-rows.count() // (4 * options.workers)) or 1)  # a few tasks for each worker
    rows.repartition(target_num_rows_per_block=block).map_batches(
        fxopt.BatchEncoder,
        fn_constructor_args=[options.folder.absolute()],
        fn_constructor_kwargs={"column": options.column, "normalize_embeddings": True},
        batch_size=256,
        num_cpus=1,
        compute=ray.data.ActorPoolStrategy(size=options.workers),
    ).write_parquet(options.target, min_rows_per_file=16 * options.block)


if __name__ == "__main__":
    main()
