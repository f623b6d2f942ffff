"""Files in safetensors format: what is told from their headers, and their values."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings, strategies as st
from safetensors_writing import NAMES, contents, write_raw, write_safetensors

from fxopt_checkpoints.streaming import safetensors as reading
from fxopt_checkpoints.streaming.safetensors import Reader, read_header
from fxopt_core import CheckpointError


def _some() -> dict[str, torch.Tensor]:
    return {"a": torch.arange(6.0).reshape(2, 3), "b": torch.tensor([1, 2])}


@pytest.mark.parametrize("dtype", list(NAMES), ids=str)
def test_tensors_of_every_dtype_are_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"x": torch.arange(6).reshape(2, 3).to(dtype), "one": torch.tensor(1).to(dtype)}
    header = read_header(write_safetensors(tmp_path / "f.safetensors", tensors))
    with Reader() as reader:
        found = {key: reader.read(stored) for key, stored in header.items()}
    assert list(found) == ["x", "one"]
    assert all(torch.equal(found[key], tensors[key]) and found[key].dtype == dtype for key in tensors)


def test_an_empty_tensor_and_an_empty_file(tmp_path: Path) -> None:
    header = read_header(write_safetensors(tmp_path / "f.safetensors", {"x": torch.empty(0, 3), "y": torch.ones(1)}))
    with Reader() as reader:
        assert [reader.read(stored).shape for stored in header.values()] == [(0, 3), (1,)]
    assert read_header(write_safetensors(tmp_path / "g.safetensors", {})) == {}


@settings(deadline=None, max_examples=30)
@given(
    shape=st.lists(st.integers(1, 7), max_size=4),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    chunk=st.sampled_from([8, 24, 64, 1 << 20]),
    turned=st.booleans(),
)
def test_reading_into_any_view_gives_the_values(
    tmp_path_factory: pytest.TempPathFactory, shape: list[int], dtype: torch.dtype, chunk: int, turned: bool
) -> None:
    values = torch.randn(shape)
    file = write_safetensors(tmp_path_factory.mktemp("files") / "f.safetensors", {"x": values})
    place = torch.full([size + 2 for size in shape], 7.0, dtype=dtype)
    inner = place[tuple(slice(1, -1) for _ in shape)]
    if turned:
        inner = torch.empty([*reversed(shape)], dtype=dtype).permute(list(reversed(range(len(shape)))))
    with pytest.MonkeyPatch.context() as patch, Reader() as reader:
        patch.setattr(reading, "_CHUNK", chunk)
        reader.read_into(read_header(file)["x"], inner)
    assert torch.equal(inner, values.to(dtype))
    assert int((place == 7).sum()) >= place.numel() - values.numel()  # nothing beside it was written


def _raw(change: Callable[[dict[str, dict[str, object]]], object]) -> Callable[[Path], Path]:
    def written(file: Path) -> Path:
        header, data = contents(_some())
        change(header)
        return write_raw(file, json.dumps(header), data)

    return written


def _cut(file: Path) -> Path:
    write_safetensors(file, _some())
    file.write_bytes(file.read_bytes()[:-20])
    return file


def _twice(file: Path) -> Path:
    header, data = contents(_some())
    entry = json.dumps(header["a"])
    return write_raw(file, f'{{"a": {entry}, "a": {entry}}}', data)


def _plain(data: bytes) -> Callable[[Path], Path]:
    def written(file: Path) -> Path:
        file.write_bytes(data)
        return file

    return written


BROKEN: dict[str, tuple[Callable[[Path], Path], str]] = {
    "truncated": (_cut, "`a` in `.*` is truncated: it ends at byte .*, and the file at"),
    "one tensor too far": (_raw(lambda header: header["b"].update(data_offsets=[32, 48])), "`b` in .* begins at byte"),
    "overlapping": (_raw(lambda header: header["b"].update(data_offsets=[8, 24])), "`b` in .* begins at byte"),
    "other size": (
        _raw(lambda header: header["a"].update(shape=[3, 3])),
        "`a` in .* has 24 bytes, expected 36",
    ),
    "unknown dtype": (_raw(lambda header: header["a"].update(dtype="F4")), "`a` in .* is of dtype 'F4'"),
    "negative": (_raw(lambda header: header["a"].update(shape=[-2, -3])), "`a` in .* is described by"),
    "no shape": (_raw(lambda header: header["a"].pop("shape")), "`a` in .* is described by"),
    "an entry that is none": (_raw(lambda header: header.update(a=3)), "`a` in .* is described by '3'"),  # type: ignore[call-overload]  # meant
    "bytes left": (_raw(lambda header: header.pop("b")), "has 16 bytes after its last tensor"),
    "a name twice": (_twice, "it has `a` twice"),
    "text": (_plain(b"this is only some text, and more"), "no safetensors file, or truncated within its header"),
    "empty": (_plain(b""), "it has 0 bytes"),
    "header cut": (_plain((1000).to_bytes(8, "little") + b"{"), "truncated within its header"),
    "no JSON": (_plain((4).to_bytes(8, "little") + b"{,,}"), "its header is no JSON"),
    "a list": (_plain((2).to_bytes(8, "little") + b"[]"), "its header is a list"),
    "no UTF-8": (_plain((2).to_bytes(8, "little") + b"\xff\xfe"), "its header is no JSON"),
    "a zip": (_plain(b"PK\x03\x04" + bytes(40)), "but a zip archive"),
    "a pickle": (_plain(b"\x80\x02" + bytes(40)), "but a pickle"),
    "Git LFS": (_plain(b"version https://git-lfs.github.com/spec/v1\noid sha256:0"), "git lfs pull"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused_by_name(tmp_path: Path, name: str) -> None:
    write, message = BROKEN[name]
    file = write(tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=message) as caught:
        read_header(file)
    assert str(file) in str(caught.value)


def test_all_truncated_tensors_are_named(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "f.safetensors", {"a": torch.ones(4), "b": torch.ones(4), "c": torch.ones(4)})
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(CheckpointError, match=r"`b` in .* is truncated") as caught:
        read_header(file)
    assert "`c` in" in str(caught.value) and "`a` in" not in str(caught.value)


def test_a_file_that_is_missing_or_a_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="cannot be read: No such file"):
        read_header(tmp_path / "absent.safetensors")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_header(tmp_path)


def test_a_file_that_becomes_shorter_meanwhile(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "f.safetensors", _some())
    header = read_header(file)
    file.write_bytes(file.read_bytes()[:-30])
    with Reader() as reader, pytest.raises(CheckpointError, match=r"became shorter while it was read: .* of `a`"):
        reader.read(header["a"])
