"""Where archives are read from and written to: paths, open files, places that are none, and failures half way."""

from __future__ import annotations

from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from archive_models import layout
from torch import nn
from torch.fx import GraphModule

from fxopt_capture.archive.files import load, save
from fxopt_core import history
from fxopt_core.errors import CaptureError, FxoptError


def test_paths_and_open_files(path: Path) -> None:
    """A path as text, bytes or `Path`; a file on disk or in memory."""
    first = load(path)
    buffer, beside = BytesIO(), path.with_name("other")
    save(first, buffer)
    save(first, bytes(beside))
    with beside.open("rb") as opened, path.with_name("third").open("wb") as written:
        save(first, written)
        for source in (str(path), bytes(beside), opened, BytesIO(buffer.getvalue()), path.with_name("third")):
            loaded = load(source)
            assert layout(loaded) == layout(first)
            assert history(loaded) == history(first)


def test_weights_that_are_loaded_in_inference_mode_can_be_trained(path: Path) -> None:
    with torch.inference_mode():
        loaded = load(path)
    assert not any(tensor.is_inference() for tensor in (*loaded.parameters(), *loaded.buffers()))


def test_files_that_are_not_open_for_it(path: Path) -> None:
    """Text, nothing, a file that is open for reading only."""
    wrong: Any
    for wrong in (None, 3, []):
        with pytest.raises(CaptureError, match="neither a path nor an open file; expected an archive"):
            load(wrong)
    wrong = StringIO("text")
    with pytest.raises(CaptureError, match=r"open it for reading bytes: open\(path, 'rb'\)"):
        load(wrong)
    with pytest.raises(CaptureError, match="a BytesIO' is not an archive"):
        load(BytesIO(b"no archive"))
    with path.open("rb") as opened, pytest.raises(CaptureError, match=r"model\.fxopt' cannot be written"):
        save(load(path), opened)


def test_a_failure_leaves_the_file_that_was_there(path: Path, padded: GraphModule) -> None:
    content = path.read_bytes()
    padded.get_submodule("block").register_forward_hook(lambda module, args, output: None)
    with pytest.raises(CaptureError, match="module `block` has hooks"):
        save(padded, path)
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_a_place_that_cannot_be_written(tmp_path: Path, perceptron: GraphModule) -> None:
    for place, found in (
        (tmp_path / "missing" / "model.fxopt", ": No such file"),
        (tmp_path, ", as it is a directory"),
    ):
        with pytest.raises(CaptureError, match=f"cannot be written{found}"):
            save(perceptron, place)
    nothing: Any = None
    with pytest.raises(CaptureError, match="a NoneType is neither a path nor an open file"):
        save(perceptron, nothing)
    assert not list(tmp_path.iterdir())


def test_a_link_stays_a_link(path: Path, perceptron: GraphModule) -> None:
    link = path.with_name("link.fxopt")
    link.symlink_to(path)
    save(perceptron, link)
    assert link.is_symlink()
    assert history(load(path)) == ()


def test_what_is_no_graph_module(tmp_path: Path) -> None:
    wrong: Any = nn.Linear(2, 2)
    with pytest.raises(FxoptError, match="GraphModule"):
        save(wrong, tmp_path / "model.fxopt")


def test_the_suffix_of_programs(tmp_path: Path, perceptron: GraphModule) -> None:
    with pytest.raises(CaptureError, match=r"torch\.export\.save\(fxopt_capture\.export\(graph_module\)"):
        save(perceptron, tmp_path / "model.pt2")
    save(perceptron, tmp_path / "model.bin")
    assert torch.equal(load(tmp_path / "model.bin")(torch.ones(2, 4)), perceptron(torch.ones(2, 4)))
