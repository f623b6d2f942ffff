"""Archives from strangers: nothing of them runs, on loading or on calling, and none takes much time or memory."""

from __future__ import annotations

import contextlib
import io
import os
import resource
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hostile_archives import ATTACKS, DOCUMENT, LEDGER, Entries, compressed, damaged, entries_of, overlapping, packed
from hypothesis import settings

from fxopt_capture.archive.files import load
from fxopt_core.errors import CaptureError, FxoptError

X = torch.ones(3, 4)


@pytest.fixture(scope="module")
def valid(archive: bytes) -> Entries:
    """The entries of an archive with a ledger."""
    return entries_of(io.BytesIO(archive))


@contextlib.contextmanager
def bounded(seconds: float = 20, mebibytes: int = 300) -> Iterator[None]:
    """Fail where what runs within takes longer on the processor, or more memory."""
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    yield
    assert time.process_time() - start < seconds
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < mebibytes * 1024


def load_and_call(content: bytes) -> str:
    """Load an archive and call it; return what it says, where it is refused."""
    try:
        loaded = load(io.BytesIO(content))
    except FxoptError as error:
        return str(error)
    with contextlib.suppress(Exception):  # what computes something else may not take the input
        loaded(X)
    return ""


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_nothing_of_a_file_runs(attack: Any, valid: Entries, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file is refused by one error, and leaves no mark."""
    monkeypatch.chdir(tmp_path)
    content = attack(valid, tmp_path / "mark")
    with bounded():
        message = load_and_call(content)
    assert os.listdir(tmp_path) == []
    assert 0 < len(message) < 2000


# -- bounds -----------------------------------------------------------------------------------------------------------


def test_a_bomb_is_not_unpacked(valid: Entries) -> None:
    content = compressed(valid, 1 << 26)
    assert len(content) < 1 << 20
    with bounded(seconds=5, mebibytes=50), pytest.raises(CaptureError, match="is compressed or encrypted"):
        load(io.BytesIO(content))


def test_entries_that_share_their_bytes_take_no_more_than_the_file(valid: Entries) -> None:
    content = overlapping(valid, 2000)
    with bounded(seconds=10, mebibytes=100), pytest.raises(CaptureError, match=r"lies in another one"):
        load(io.BytesIO(content))


def test_json_that_nests_deeply(valid: Entries) -> None:
    for name in (LEDGER, DOCUMENT):
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
        for _ in range(CASES):
            message = load_and_call(damaged(content, valid, random))
            refused += bool(message)
    assert os.listdir(tmp_path) == []
    assert refused > CASES // 4
