"""Archives from strangers: nothing of them runs, on loading or on calling, and none takes much time or memory."""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from archive_models import PadOutputs, Perceptron
from hostile_archives import ATTACKS, DOCUMENT, MODEL, Entries, compressed, damaged, entries_of, overlapping, packed
from hypothesis import settings

from fxopt_capture import capture
from fxopt_capture.archive.files import load, save
from fxopt_core.errors import CaptureError, FxoptError

X = torch.ones(3, 4)


@pytest.fixture(scope="module")
def valid(tmp_path_factory: pytest.TempPathFactory) -> Entries:
    """The entries of an archive with a ledger."""
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("archives") / "model.pt2"
    save(PadOutputs()(capture(Perceptron(), torch.randn(2, 4))), path)
    return entries_of(path)


@contextlib.contextmanager
def bounded(seconds: float = 20, mebibytes: int = 300) -> Iterator[None]:
    """Fail where what runs within takes longer on the processor, or more memory."""
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - start < seconds
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < mebibytes * 1024


def load_and_call(content: bytes, *, ledger: bool) -> str:
    """Load an archive and call it; return what it says, where it is refused."""
    try:
        loaded = load(io.BytesIO(content), ledger=ledger)
    except FxoptError as error:
        return str(error)
    with contextlib.suppress(Exception):  # what computes something else may not take the input
        loaded(X)
    return ""


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_nothing_of_a_file_runs(attack: Any, valid: Entries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is refused by one error, or loaded without what is hostile in it; neither leaves a mark."""
    monkeypatch.chdir(tmp_path)
    content = attack(valid, tmp_path / "mark")
    with bounded():
        messages = [load_and_call(content, ledger=ledger) for ledger in (True, False)]
    assert os.listdir(tmp_path) == []
    assert all(len(message) < 2000 for message in messages)


DROPPED = {"model.PT", "Weight_0", "MODEL.json", "sample inputs", "a second model", "a library"}


@pytest.mark.parametrize("name", sorted(ATTACKS.keys() - DROPPED))
def test_what_is_hostile_is_refused(name: str, valid: Entries, tmp_path: Path) -> None:
    assert load_and_call(ATTACKS[name](valid, tmp_path / "mark"), ledger=True)


@pytest.mark.parametrize("name", sorted(DROPPED))
def test_what_a_program_does_not_need_is_not_read(name: str, valid: Entries, tmp_path: Path) -> None:
    expected = load(io.BytesIO(packed(valid)))(X)
    loaded = load(io.BytesIO(ATTACKS[name](valid, tmp_path / "mark")))
    assert torch.equal(loaded(X), expected)


def test_the_older_format_says_how_to_convert_it(valid: Entries, tmp_path: Path) -> None:
    with pytest.raises(CaptureError, match=r"older format, .* To convert it, give it to torch\.export\.load and"):
        load(io.BytesIO(ATTACKS["the older format"](valid, tmp_path / "mark")))


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_a_bomb_is_not_unpacked(valid: Entries) -> None:
    content = compressed(valid, 1 << 28)
    assert len(content) < 1 << 20
    with bounded(seconds=5, mebibytes=50), pytest.raises(CaptureError, match="is compressed or encrypted"):
        load(io.BytesIO(content))


def test_entries_that_share_their_bytes_take_no_more_than_the_file(valid: Entries) -> None:
    content = overlapping(valid, 2000)
    with bounded(seconds=10, mebibytes=100), pytest.raises(CaptureError, match=r"hold more than the file does|damaged"):
        load(io.BytesIO(content))


def test_a_weight_without_bytes_takes_no_memory(valid: Entries) -> None:
    config = json.loads(valid["data/weights/model_weights_config.json"])
    meta = next(iter(config["config"].values()))
    meta["tensor_meta"]["sizes"] = [{"as_int": 1 << 20}, {"as_int": 1 << 20}]
    hostile = {**valid, "data/weights/model_weights_config.json": json.dumps(config).encode()}
    hostile[f"data/weights/{meta['path_name']}"] = b""
    with bounded(seconds=5, mebibytes=50), pytest.raises(CaptureError, match="holds nothing of"):
        load(io.BytesIO(packed(hostile)))


def test_special_files(tmp_path: Path) -> None:
    """None is waited for, and none is read to an end that it has not."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with bounded(seconds=2, mebibytes=20), pytest.raises(CaptureError, match="is a "):
            load(tmp_path / name)


def test_json_that_nests_deeply(valid: Entries) -> None:
    for name in (MODEL, DOCUMENT):
        for text in (b"[" * 200_000, b'{"a":' * 200_000, b"[" * 100_000 + b"]" * 100_000):
            with bounded(), pytest.raises(CaptureError):
                load(io.BytesIO(packed({**valid, name: text})))


# -- damage -----------------------------------------------------------------------------------------------------------

CASES = 300 if settings().max_examples <= 100 else 5000


def test_damaged_archives_are_refused_or_right(valid: Entries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bits, entries and values of JSON that changed at random give one error, or a module that can be called."""
    monkeypatch.chdir(tmp_path)
    content, random, refused = packed(valid), Random(14), 0
    with bounded(seconds=CASES * 0.5, mebibytes=300 + (CASES - 300) // 10):  # 52 kB of each stay, such as code
        for case in range(CASES):
            message = load_and_call(damaged(content, valid, random), ledger=case % 2 == 0)
            refused += bool(message)
    assert os.listdir(tmp_path) == []
    assert refused > CASES // 3
