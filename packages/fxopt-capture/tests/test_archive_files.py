"""Where archives are read from and written to: paths, open files, places that are none, and failures half way."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from archive_models import PadOutputs, Perceptron, layout
from torch import nn

from fxopt_capture import capture
from fxopt_capture.archive.files import load, save
from fxopt_core import history
from fxopt_core.errors import CaptureError, FxoptError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """An archive with a ledger."""
    torch.manual_seed(0)
    path = tmp_path / "model.pt2"
    save(PadOutputs()(capture(Perceptron(), torch.randn(2, 4))), path)
    return path


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


def test_files_that_are_not_open_for_it(path: Path) -> None:
    """Text, nothing, a file that is open for reading only."""
    wrong: Any
    for wrong in (None, 3, []):
        with pytest.raises(CaptureError, match="neither a path nor an open file; give a file that"):
            load(wrong)
    wrong = StringIO("text")
    with pytest.raises(CaptureError, match=r"open it for reading bytes: open\(path, 'rb'\)"):
        load(wrong)
    with pytest.raises(CaptureError, match="a BytesIO' is no archive"):
        load(BytesIO(b"no archive"))
    with path.open("rb") as opened, pytest.raises(CaptureError, match=r"model\.pt2' cannot be written"):
        save(load(path), opened)


def test_no_damage_raises_anything_else(path: Path) -> None:
    """Whatever bytes are changed: the file loads, or the error names it."""
    content, draw = path.read_bytes(), random.Random(0)
    damaged = path.with_name("damaged.pt2")
    refused = 0
    for _ in range(60):
        changed = bytearray(content)
        for _ in range(draw.choice((1, 5, 50))):
            changed[draw.randrange(len(changed))] = draw.randrange(256)
        damaged.write_bytes(changed)
        try:
            load(damaged)
        except CaptureError as error:
            refused += 1
            assert "damaged.pt2" in str(error)
    assert refused > 40


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, error: Exception) -> Iterator[None]:
    """While open, torch writes half of an archive and fails."""

    def write(program: object, file: Any, **_: object) -> None:
        file.write(b"half")
        raise error

    with monkeypatch.context() as patched:
        patched.setattr(torch.export, "save", write)
        yield


@pytest.mark.parametrize("error", [OSError("disk full"), RuntimeError("no name"), KeyboardInterrupt()], ids=repr)
def test_a_failure_leaves_the_file_that_was_there(
    path: Path, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = path.read_bytes()
    captured = capture(Perceptron(), torch.randn(2, 4))
    expected = CaptureError if isinstance(error, Exception) else KeyboardInterrupt
    with failing(monkeypatch, error), pytest.raises(expected):  # type: ignore[arg-type]  # an interrupt is raised as well
        save(captured, path)
    assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    captured = capture(Perceptron(), torch.randn(2, 4))
    with pytest.raises(CaptureError, match=r"there is no folder '.*missing'; create it first"):
        save(captured, tmp_path / "missing" / "model.pt2")
    for folder in (tmp_path, f"{tmp_path}/", ""):
        with pytest.raises(CaptureError, match=r"cannot be written, as it names no file"):
            save(captured, folder)
    nothing: Any = None
    with pytest.raises(CaptureError, match="a NoneType is neither a path nor an open file"):
        save(captured, nothing)
    assert not list(tmp_path.iterdir())


def test_a_link_stays_a_link(path: Path) -> None:
    link = path.with_name("link.pt2")
    link.symlink_to(path)
    save(capture(Perceptron(), torch.randn(2, 4)), link)
    assert link.is_symlink()
    assert history(load(path)) == ()


def test_what_is_no_graph_module(tmp_path: Path) -> None:
    wrong: Any = nn.Linear(2, 2)
    with pytest.raises(FxoptError, match="GraphModule"):
        save(wrong, tmp_path / "model.pt2")


def test_inputs_that_it_does_not_take(tmp_path: Path) -> None:
    captured = capture(Perceptron(), torch.randn(2, 4))
    with pytest.raises(CaptureError, match="takes 1 positional arguments, and 2 were given"):
        save(captured, tmp_path / "model.pt2", (torch.randn(2, 4), torch.randn(2, 4)))
    with pytest.raises(CaptureError, match=r"has size 3 in dimension 1") as caught:
        save(captured, tmp_path / "model.pt2", torch.randn(2, 3))
    assert "While executing" not in str(caught.value)
    wrong: Any
    for wrong in (5, "text", {"x": torch.randn(2, 4)}):
        with pytest.raises(CaptureError, match="give a tensor, or a tuple"):
            save(captured, tmp_path / "model.pt2", wrong)
    wrong = [torch.randn(2, 4)]
    with pytest.raises(CaptureError, match="kwargs is a list; give a dictionary"):
        save(captured, tmp_path / "model.pt2", kwargs=wrong)
    assert not list(tmp_path.iterdir())


def test_a_graph_that_fixes_what_varies(tmp_path: Path) -> None:
    captured = capture(Perceptron(), torch.randn(2, 4))
    output = next(iter(captured.graph.find_nodes(op="output")))
    with captured.graph.inserting_before(output):
        product = output.all_input_nodes[0]
        call = captured.graph.call_function(torch.ops.aten.expand.default, (product, [2, 5]))
        output.replace_input_with(product, call)
    captured.recompile()
    with pytest.raises(CaptureError, match=r"dimension 0 of input \['x'\] is dynamic in this graph module, and"):
        save(captured, tmp_path / "model.pt2")
