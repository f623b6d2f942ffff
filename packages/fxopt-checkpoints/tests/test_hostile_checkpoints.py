"""Checkpoints and key maps of strangers: one error in short time, whatever their headers and indices say."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
from safetensors_writing import write_raw

from fxopt_checkpoints import KeyMap
from fxopt_checkpoints.streaming.safetensors import read_header
from fxopt_checkpoints.streaming.shards import stored_tensors
from fxopt_core import CheckpointError, FxoptError

DEEP = "[" * 200_000 + "]" * 200_000


def entry(**changes: Any) -> str:
    return json.dumps({"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8], **changes}})


HEADERS = {
    "negative offsets": entry(data_offsets=[-8, 0]),
    "offsets backwards": entry(data_offsets=[8, 0]),
    "offsets outside of the file": entry(shape=[2**40], data_offsets=[0, 2**42]),
    "offsets after a gap": entry(data_offsets=[4, 12]),
    "offsets that are no numbers": entry(data_offsets=["0", "8"]),
    "offsets that are truth values": entry(shape=[], data_offsets=[False, True]),
    "offsets of many digits": entry(data_offsets=[0, 10**4000]),
    "three offsets": entry(data_offsets=[0, 4, 8]),
    "a negative size": entry(shape=[-2]),
    "sizes whose product is endless": entry(shape=[10**4000] * 1000),
    "more dimensions than torch has": entry(shape=[1] * 65),
    "a million sizes": entry(shape=[1] * 10**6),
    "a size of zero and a huge one": entry(shape=[0, 2**70], data_offsets=[0, 0]),
    "no shape": json.dumps({"x": {"dtype": "F32", "data_offsets": [0, 8]}}),
    "an unknown dtype": entry(dtype="F33"),
    "a dtype that is a list": entry(dtype=["F32"]),
    "a nested entry": f'{{"x": {DEEP}}}',
    "nested lists": DEEP,
    "a nested size": entry().replace("[2]", DEEP),
    "a list": "[1]",
    "a number": "1",
    "no JSON": "{",
    "NaN": '{"x": NaN}',
    "a number of many digits": f'{{"x": {"1" * 5000}}}',
    "overlapping tensors": json.dumps({
        name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} for name in ("x", "y")
    }),
}  # fmt: skip


@pytest.mark.parametrize("header", HEADERS.values(), ids=HEADERS)
def test_a_header_that_lies_is_one_error(tmp_path: Path, header: str) -> None:
    start = time.perf_counter()
    with pytest.raises(CheckpointError) as caught:
        read_header(write_raw(tmp_path / "f.safetensors", header, bytes(8)))
    assert "f.safetensors" in str(caught.value)
    assert len(str(caught.value)) < 1000
    assert time.perf_counter() - start < 20


@pytest.mark.parametrize("length", [2**64 - 1, 2**63, 10**8 + 1, 10**7 + 1])
def test_a_header_longer_than_its_file_is_not_read(tmp_path: Path, length: int) -> None:
    (tmp_path / "f.safetensors").write_bytes(length.to_bytes(8, "little") + b"{}")
    with pytest.raises(CheckpointError, match="or truncated within its header"):
        read_header(tmp_path / "f.safetensors")


def test_a_name_that_comes_twice_is_found_in_linear_time(tmp_path: Path) -> None:
    names = [*(f"t{number}" for number in range(50_000)), "t49999"]
    text = ", ".join(f'"{name}": {{"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}}' for name in names)
    start = time.perf_counter()
    with pytest.raises(CheckpointError, match="it has `t49999` twice"):
        read_header(write_raw(tmp_path / "f.safetensors", f"{{{text}}}", b""))
    assert time.perf_counter() - start < 10


def test_of_many_problems_the_first_are_listed(tmp_path: Path) -> None:
    header = {f"t{number}": {"dtype": "F33", "shape": [], "data_offsets": [0, 0]} for number in range(5000)}
    with pytest.raises(CheckpointError, match="and 4950 more") as caught:
        read_header(write_raw(tmp_path / "f.safetensors", json.dumps(header), b""))
    assert len(str(caught.value).splitlines()) == 51


INDICES = {
    "nested lists": DEEP,
    "a nested map": f'{{"weight_map": {DEEP}}}',
    "a nested name": f'{{"weight_map": {{"x": {DEEP}}}}}',
    "a path": '{"weight_map": {"x": "../f.safetensors"}}',
    "an absolute path": '{"weight_map": {"x": "/dev/zero"}}',
    "the folder": '{"weight_map": {"x": "."}}',
    "the folder above": '{"weight_map": {"x": ".."}}',
    "an empty name": '{"weight_map": {"x": ""}}',
    "a zero byte": '{"weight_map": {"x": "a\\u0000b"}}',
    "half a character": '{"weight_map": {"x": "\\ud800"}}',
    "the index itself": '{"weight_map": {"x": "model.safetensors.index.json"}}',
    "a long name": json.dumps({"weight_map": {"x": "x" * 10_000}}),
    "a number": '{"weight_map": {"x": 1}}',
    "no map": "{}",
}


@pytest.mark.parametrize("index", INDICES.values(), ids=INDICES)
def test_an_index_that_lies_is_one_error(tmp_path: Path, index: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        stored_tensors(tmp_path)


def test_a_huge_index_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "model.safetensors.index.json").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(CheckpointError, match="it has more than 100000000 bytes"):
        stored_tensors(tmp_path)


@pytest.mark.parametrize("text", [DEEP, f'{{"fxopt_key_map": 2, "originals": {DEEP}}}'])
def test_a_nested_key_map_is_one_error(text: str) -> None:
    with pytest.raises(FxoptError, match="this key map cannot be read"):
        KeyMap.from_json(text)


def test_settings_in_a_key_map_are_data() -> None:
    settings = [["eps", {"name": "os:system"}]]
    step = {"function": "m:f", "pass_name": "p", "inputs": [], "outputs": [], "settings": settings}
    with pytest.raises(FxoptError, match="settings of `m:f` that are no numbers"):
        KeyMap.from_json(json.dumps({"fxopt_key_map": 2, "originals": [], "steps": [{"Derivation": step}]}))
