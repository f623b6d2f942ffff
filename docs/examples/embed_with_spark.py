"""Embed a column of Parquet files with Spark, in the Python workers of its executors.

    fxopt optimize sentence-transformers/all-MiniLM-L6-v2 -o minilm-fast
    spark-submit --master 'local[4]' embed_with_spark.py minilm-fast texts vectors

Spark reads, retries and writes. Each Python worker has one core and opens the folder once; every node has to find it
under the same path.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.ml.functions import predict_batch_udf
from pyspark.sql import SparkSession
from pyspark.sql.types import ArrayType, FloatType

import fxopt


def main() -> None:
    parser = argparse.ArgumentParser(description="Embed a column of Parquet files with Spark.")
    parser.add_argument("folder", type=Path, help="what `fxopt optimize FOLDER -o OUT` wrote")
    parser.add_argument("source", help="Parquet files with the texts: a folder, or an address that Spark reads")
    parser.add_argument("target", help="where the same rows go, with the vectors")
    parser.add_argument("--column", default="text", help="the column with the texts")
    options = parser.parse_args()
    folder = options.folder.absolute()

    def make_predict_fn() -> Callable[[Any], Any]:
        """Run once in each Python worker; what it returns takes and gives NumPy arrays."""
        encoder = fxopt.BatchEncoder(folder, normalize_embeddings=True)
        return lambda texts: encoder.encode(texts)  # Spark takes each parameter for a column, and `encode` has options

    embed = predict_batch_udf(make_predict_fn, return_type=ArrayType(FloatType()), batch_size=256)
    spark = SparkSession.builder.appName("embed").getOrCreate()
    rows = spark.read.parquet(options.source)
    rows.withColumn("embedding", embed(options.column)).write.parquet(options.target)
    spark.stop()


if __name__ == "__main__":
    main()
