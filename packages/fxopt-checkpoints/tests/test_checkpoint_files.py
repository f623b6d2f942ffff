"""Checkpoints in files: one, shards with an index, folders; and indices that lie."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors_writing import write_safetensors, write_shards

from fxopt_checkpoints.streaming.renaming import renamed
from fxopt_checkpoints.streaming.shards import stored_tensors
from fxopt_core import CheckpointError

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def _shards() -> dict[str, dict[str, torch.Tensor]]:
    return {ONE: {"a": torch.ones(2), "b": torch.ones(3)}, TWO: {"c": torch.ones(4)}}


def test_one_file_and_its_folder(tmp_path: Path) -> None:
    file = write_safetensors(tmp_path / "model.safetensors", {"a": torch.ones(2)})
    assert stored_tensors(file) == stored_tensors(tmp_path) == stored_tensors(str(tmp_path))
    assert list(stored_tensors(file)) == ["a"]


def test_shards_by_index_and_by_folder(tmp_path: Path) -> None:
    index = write_shards(tmp_path, _shards())
    found = stored_tensors(index)
    assert found == stored_tensors(tmp_path)
    assert {key: stored.file.name for key, stored in found.items()} == {"a": ONE, "b": ONE, "c": TWO}


def test_the_single_file_comes_before_an_index(tmp_path: Path) -> None:
    write_shards(tmp_path, _shards())
    write_safetensors(tmp_path / "model.safetensors", {"x": torch.ones(2)})
    assert list(stored_tensors(tmp_path)) == ["x"]


def test_other_names_in_a_folder(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "unet.safetensors", {"x": torch.ones(2)})
    assert list(stored_tensors(tmp_path)) == ["x"]
    write_safetensors(tmp_path / "vae.safetensors", {"y": torch.ones(2)})
    with pytest.raises(CheckpointError, match=r"several checkpoints \(unet.safetensors, vae.safetensors\)"):
        stored_tensors(tmp_path)


def test_a_folder_without_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has no checkpoint in safetensors format$"):
        stored_tensors(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"`pytorch_model.bin` holds pickles"):
        stored_tensors(tmp_path)


def test_a_path_to_nothing(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"there is no checkpoint `.*absent`; expected"):
        stored_tensors(tmp_path / "absent")


LIES: dict[str, tuple[dict[str, Any], str]] = {
    "an absent file": ({"weight_map": {"c": "gone.safetensors"}}, "`c`: `.*` says they are in `gone.safetensors`"),
    "another shard": ({"weight_map": {"b": TWO}}, f"`b`: `.*` says it is in `{TWO}`, and it is in `{ONE}`"),
    "in no shard": ({"weight_map": {"d": TWO}}, f"`d`: `.*` says it is in `{TWO}`, and no shard has it"),
    "one left out": ({"weight_map": {"b": None}}, f"`b` is in `{ONE}`, and `.*` does not name it"),
    "total size": ({"total_size": 37}, "says that its tensors have 37 bytes, and they have 36"),
    "a path upwards": ({"weight_map": {"c": f"../{TWO}"}}, "`c`: its shard '../.*' .* is no name of a file beside it"),
    "a number": ({"weight_map": {"c": 7}}, "`c`: its shard '7' .* is no name of a file beside it"),
}


@pytest.mark.parametrize("name", LIES)
def test_an_index_that_lies(tmp_path: Path, name: str) -> None:
    changes, message = LIES[name]
    index = write_shards(tmp_path, _shards(), **changes)
    with pytest.raises(CheckpointError, match=message) as caught:
        stored_tensors(tmp_path)
    assert str(index) in str(caught.value)


def test_a_key_in_two_shards(tmp_path: Path) -> None:
    shards = _shards()
    shards[TWO]["a"] = torch.zeros(2)
    write_shards(tmp_path, shards)
    with pytest.raises(CheckpointError, match=f"`a` is in several shards of .*: `{ONE}`, `{TWO}`"):
        stored_tensors(tmp_path)


def test_a_name_twice_in_the_index(tmp_path: Path) -> None:
    index = write_shards(tmp_path, _shards())
    index.write_text(f'{{"weight_map": {{"a": "{ONE}", "a": "{TWO}"}}}}', encoding="utf-8")
    with pytest.raises(CheckpointError, match="is no index of a checkpoint: it has `a` twice"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize("text", ["no JSON", "[]", "{}", '{"weight_map": []}'])
def test_an_index_that_is_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match="is no index of a checkpoint"):
        stored_tensors(tmp_path)


def test_an_index_without_a_size(tmp_path: Path) -> None:
    index = write_shards(tmp_path, _shards())
    data = json.loads(index.read_text(encoding="utf-8"))
    del data["metadata"]
    index.write_text(json.dumps(data), encoding="utf-8")
    assert list(stored_tensors(index)) == ["a", "b", "c"]


def test_a_truncated_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, _shards())
    file = tmp_path / TWO
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match=f"`c` in `.*{TWO}` is truncated"):
        stored_tensors(tmp_path)


def test_renaming_and_passing_over(tmp_path: Path) -> None:
    stored = stored_tensors(write_shards(tmp_path, _shards()))
    found = renamed(stored, {"a": "x", "b": None, "c": "c"}.__getitem__)
    assert {name: each.key for name, each in found.items()} == {"x": "a", "c": "c"}
    with pytest.raises(CheckpointError, match=r"`a` in .* and `c` in .* would both be `x` in the model"):
        renamed(stored, {"a": "x", "b": "b", "c": "x"}.__getitem__)
