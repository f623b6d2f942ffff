"""Paths that are no regular files are refused at once, wherever a user gives one: reading them might never end."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_runs import fxopt
from torch import nn

from fxopt_capture import capture, load, save
from fxopt_checkpoints import load_checkpoint
from fxopt_core import CaptureError, CheckpointError
from fxopt_rewrite import special_kind


def fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def endless(path: Path) -> Path:
    path.symlink_to("/dev/zero")
    return path


def linked_fifo(path: Path) -> Path:
    path.symlink_to(fifo(path.with_name("elsewhere")))
    return path


def unix_socket(path: Path) -> Path:
    here = os.open(".", os.O_RDONLY)
    try:
        os.chdir(path.parent)  # the address of a socket is short
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(here)
        os.close(here)
    return path


KINDS: dict[str, Callable[[Path], Path]] = {
    "a FIFO": fifo,
    "a FIFO ": linked_fifo,
    "a device": endless,
    "a socket": unix_socket,
}
specials = pytest.mark.parametrize("make", [fifo, endless], ids=lambda make: make.__name__)


@pytest.fixture(autouse=True)
def no_hang() -> Iterator[None]:
    """Fail instead of waiting for ever."""

    def stop(*_: object) -> None:
        raise AssertionError("it waits")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("expected", KINDS)
def test_what_a_path_is(tmp_path: Path, expected: str) -> None:
    assert special_kind(KINDS[expected](tmp_path / "x")) == expected.strip()


def test_regular_and_missing_files_are_not_special(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "x")
    (tmp_path / "broken").symlink_to(tmp_path / "nowhere")
    assert [special_kind(tmp_path / name) for name in ("x", "link", "broken", "nowhere", "a\0b")] == [None] * 5


@specials
def test_archives(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    with pytest.raises(CaptureError, match=r"is a \w+, not a file"):
        load(make(tmp_path / "model.fxopt"))


def test_an_open_device_is_no_archive() -> None:
    with open("/dev/zero", "rb") as file, pytest.raises(CaptureError, match="is a device"):
        load(file)


@specials
@pytest.mark.parametrize("name", ["model.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("within", [True, False], ids=["folder", "file"])
def test_checkpoints(tmp_path: Path, make: Callable[[Path], Path], name: str, within: bool) -> None:
    path = make(tmp_path / name)
    with pytest.raises(CheckpointError, match=r"is a \w+, expected a file|has neither"):
        load_checkpoint(capture(nn.Linear(2, 2), torch.ones(2)), tmp_path if within else path)


@specials
def test_shards(tmp_path: Path, make: Callable[[Path], Path]) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"weight": "one.safetensors"}}')
    make(tmp_path / "one.safetensors")
    with pytest.raises(CheckpointError, match=r"`.*one.safetensors` cannot be read: it is a \w+, expected a file"):
        load_checkpoint(capture(nn.Linear(2, 2), torch.ones(2)), tmp_path)


def refused(*arguments: Any) -> str:
    """Run the command; return the one line that it prints."""
    (line,) = fxopt(*arguments, code=3).stderr.splitlines()
    return line


@specials
def test_the_command_names_the_kind_of_every_file_that_it_is_given(
    tmp_path: Path, make: Callable[[Path], Path]
) -> None:
    path, model = make(tmp_path / "model.fxopt"), tmp_path / "sound.fxopt"
    save(capture(nn.ReLU(), torch.ones(2)), model)
    for arguments in (("history", path), ("undo", path, "-o", tmp_path / "out.fxopt"), ("verify", path, model)):
        assert " is a " in refused(*arguments)
    assert " is a " in refused(
        "optimize", model, "-p", "lint-and-recompile", "-o", tmp_path / "o.fxopt", "--inputs", path
    )
    assert not (tmp_path / "out.fxopt").exists()


@specials
@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
def test_hugging_face_folders(tmp_path: Path, make: Callable[[Path], Path], name: str) -> None:
    (tmp_path / "m").mkdir()
    if name != "config.json":
        (tmp_path / "m" / "config.json").write_text("{}")
    make(tmp_path / "m" / name)
    found = refused("optimize", tmp_path / "m", "-p", "lint-and-recompile", "-o", tmp_path / "o.fxopt")
    assert " is a " in found or "has no config.json" in found
