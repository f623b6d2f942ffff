"""Checkpoints in files: one, shards with an index, folders; and headers and indices of strangers, which lie."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors_writing import write_raw, write_safetensors, write_shards

from fxopt_checkpoints.streaming.files import stored_tensors
from fxopt_checkpoints.streaming.renaming import renamed
from fxopt_core import CheckpointError

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
DEEP = "[" * 200_000 + "]" * 200_000


def _shards() -> dict[str, dict[str, torch.Tensor]]:
    return {ONE: {"a": torch.ones(2), "b": torch.ones(3)}, TWO: {"c": torch.ones(4)}}


def test_one_file_and_its_folder(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    for path in (file, tmp_path, str(tmp_path)):
        assert {key: (each.file, tuple(each.like.shape)) for key, each in stored_tensors(path).items()} == {
            "a": (file, (2,))
        }


def test_shards_by_index_and_by_folder(tmp_path: Path) -> None:
    index = write_shards(tmp_path, _shards())
    for path in (index, tmp_path):
        assert {key: each.file.name for key, each in stored_tensors(path).items()} == {"a": ONE, "b": ONE, "c": TWO}
    write_safetensors(tmp_path / "model.safetensors", {"x": torch.ones(2)})  # which comes first
    assert list(stored_tensors(tmp_path)) == ["x"]


def test_folders_without_files_of_these_names(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "unet.safetensors", {"x": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"neither `model.safetensors` nor `model.safetensors.index.json`: give"):
        stored_tensors(tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no checkpoint `.*absent`; expected"):
        stored_tensors(tmp_path / "absent")


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.float8_e4m3fn], ids=str
)
def test_tensors_are_read_in_any_order(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"x": torch.arange(6).reshape(2, 3), "one": torch.tensor(1), "none": torch.empty(0, 3)}
    tensors = {key: tensor.to(dtype) for key, tensor in tensors.items()}
    write_shards(tmp_path, {ONE: tensors, TWO: {"y": torch.ones(2)}})
    stored = stored_tensors(tmp_path)
    for key in ("x", "y", "one", "none", "x"):
        found = stored[key].read()
        assert torch.equal(found.float(), tensors.get(key, torch.ones(2)).float())
        assert (found.dtype, found.shape) == (stored[key].like.dtype, stored[key].like.shape)


def test_memory_of_a_file_is_given_back(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "model.safetensors", {f"x{n}": torch.ones(1 << 18) for n in range(8)})
    stored = stored_tensors(tmp_path)
    file = str(tmp_path.resolve() / "model.safetensors")  # other tests of this process have models mapped too

    def mapped() -> int:
        entries = Path("/proc/self/smaps").read_text().split("\n")
        places = [number for number, line in enumerate(entries) if line.endswith(file)]
        return sum(int(entries[place + 4].split()[1]) for place in places)  # Rss, in KiB

    if not Path("/proc/self/smaps").exists():
        pytest.skip("nothing says how much is mapped")
    for each in stored.values():
        assert each.read().sum() == 1 << 18
        assert mapped() < 4 << 10


def _entry(**changes: Any) -> str:
    return json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}})


HEADERS = {
    "offsets outside of the file": _entry(shape=[2**40], data_offsets=[0, 2**42]),
    "sizes whose product is endless": _entry(shape=[10**4000] * 1000),
    "a size of zero and a huge one": _entry(shape=[0, 2**70], data_offsets=[0, 0]),
    "a nested entry": f'{{"x": {DEEP}}}',
    "overlapping": json.dumps({n: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for n in ("x", "y")}),
}


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_that_lies_is_one_error(tmp_path: Path, header: str) -> None:
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match=r"f\.safetensors") as caught:
        stored_tensors(write_raw(tmp_path / "f.safetensors", header, bytes(8)))
    assert len(str(caught.value)) < 1000
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "not a safetensors file, or it is damaged"),
        ((2**64 - 1).to_bytes(8, "little") + b"{}", "not a safetensors file, or it is damaged"),
        (b"PK\x03\x04" + bytes(40), "not a safetensors file, or it is damaged"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0", "git lfs pull"),
    ],
)
def test_a_file_of_another_kind(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "f.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        stored_tensors(tmp_path / "f.safetensors")


def _index(name: object) -> str:
    return json.dumps({"weight_map": {"x": name}})


INDICES = {
    "a nested name": f'{{"weight_map": {{"x": {DEEP}}}}}',
    "a path": _index("../f.safetensors"),
    "the folder": _index("."),
    "a zero byte": _index("a\0b"),
    "the index itself": _index("model.safetensors.index.json"),
    "a long name": _index("x" * 10_000),
    "no map": "{}",
    "no JSON": "no JSON",
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_an_index_that_lies_is_one_error(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        stored_tensors(tmp_path)


def test_an_index_and_shards_that_differ(tmp_path: Path) -> None:
    write_shards(tmp_path, _shards(), b=TWO)
    with pytest.raises(CheckpointError, match=f"`b`: `.*` says it is in `{TWO}`, which does not have it"):
        stored_tensors(tmp_path)
    write_shards(tmp_path, _shards(), c="gone.safetensors")
    with pytest.raises(CheckpointError, match=r"`c`: `.*` says it is in `gone.safetensors`, and there is no such file"):
        stored_tensors(tmp_path)
    write_shards(tmp_path, _shards())
    (tmp_path / TWO).write_bytes((tmp_path / TWO).read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"`.*{TWO}` is not a safetensors file, or it is damaged"):
        stored_tensors(tmp_path)


def test_a_huge_index_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors.index.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match="it has more than 100000000 bytes"):
        stored_tensors(tmp_path)


def test_renaming_and_passing_over(tmp_path: Path) -> None:
    stored = stored_tensors(write_shards(tmp_path, _shards()))
    found = renamed(stored, {"a": "x", "b": None, "c": "c"}.__getitem__)
    assert {name: each.key for name, each in found.items()} == {"x": "a", "c": "c"}
    with pytest.raises(CheckpointError, match=r"`a` in .* and `c` in .* would both be `x` in the model"):
        renamed(stored, {"a": "x", "b": "b", "c": "x"}.__getitem__)
