"""The examples that embed Parquet files on clusters: with Ray, where a worker is killed, and with Spark."""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from published_weights import stored_bert
from typer.testing import CliRunner

import fxopt
from fxopt.commands.main import build_app

numpy = pytest.importorskip("numpy")
library = pytest.importorskip("sentence_transformers")
pytestmark = pytest.mark.filterwarnings("ignore")

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"
TEXTS = [f"Sentence {number} is about {'very ' * (number % 7)}small things." for number in range(1200)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What the command makes of a small encoder with the tokenizer of a real one."""
    folder = tmp_path_factory.mktemp("encoders")
    arguments = ["optimize", stored_bert(folder / "plain"), "-o", str(folder / "fast")]
    result = CliRunner().invoke(build_app(plain=True), arguments)
    assert result.exit_code == 0, result.output
    return folder / "fast"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Texts with numbers, in four files."""
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    (tmp_path / "texts").mkdir()
    for start in range(0, len(TEXTS), 300):
        table = arrow.table({"id": range(start, start + 300), "text": TEXTS[start : start + 300]})
        parquet.write_table(table, tmp_path / "texts" / f"{start}.parquet")
    return tmp_path / "texts"


@pytest.fixture
def ray() -> Iterator[Any]:
    """Ray with a cluster on this machine: room for two workers, and for what reads and writes."""
    ray = pytest.importorskip("ray")
    pytest.importorskip("ray.data")
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=2**28, log_to_driver=False)
    yield ray
    ray.shutdown()


def check(target: Path, folder: Path) -> None:
    """Each row is there once, with the vector that the original computes."""
    table = pytest.importorskip("pyarrow.parquet").read_table(target)
    assert sorted(table["id"].to_pylist()) == [*range(len(TEXTS))]
    rows = sorted(zip(table["id"].to_pylist(), table["text"].to_pylist(), table["embedding"].to_pylist(), strict=True))
    assert [text for _, text, _ in rows] == TEXTS
    original = library.SentenceTransformer(str(folder.parent / "plain"), device="cpu")
    expected = original.encode(TEXTS, normalize_embeddings=True)
    numpy.testing.assert_allclose([vector for *_, vector in rows], expected, atol=1e-5)


@pytest.mark.nightly
def test_a_killed_worker_of_ray_loses_and_doubles_nothing(
    ray: Any, folder: Path, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes = tmp_path / "notes"
    notes.mkdir()

    class Mortal(fxopt.BatchEncoder):
        def __call__(self, batch: Any) -> Any:
            found = super().__call__(batch)
            if 500 in batch["id"] and not list(notes.glob("killed-*")):
                (notes / f"killed-{os.getpid()}").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            (notes / f"worked-{os.getpid()}").touch()
            return found

    monkeypatch.setattr(fxopt, "BatchEncoder", Mortal)
    arguments = [str(folder), str(source), str(tmp_path / "vectors"), "--workers", "2"]
    monkeypatch.setattr(sys, "argv", ["embed_with_ray.py", *arguments])
    runpy.run_path(str(EXAMPLES / "embed_with_ray.py"), run_name="__main__")
    assert len(list(notes.glob("killed-*"))) == 1
    assert len(list(notes.glob("worked-*"))) >= 2
    check(tmp_path / "vectors", folder)


@pytest.mark.nightly
def test_spark(folder: Path, source: Path, tmp_path: Path) -> None:
    pytest.importorskip("pyspark")
    if not (shutil.which("java") or "JAVA_HOME" in os.environ):
        pytest.skip("there is no Java")
    command = [sys.executable, *map(str, (EXAMPLES / "embed_with_spark.py", folder, source, tmp_path / "vectors"))]
    spark = {"PYSPARK_SUBMIT_ARGS": "--master local[2] pyspark-shell", "PYSPARK_PYTHON": sys.executable}
    done = subprocess.run(
        command, env={**os.environ, **spark, "SPARK_LOCAL_IP": "127.0.0.1"}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    check(tmp_path / "vectors", folder)
