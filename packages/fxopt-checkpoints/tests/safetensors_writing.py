"""Checkpoint files for tests: sound ones, and ones with any header."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import TensorSpec, serialize_file
from torch import Tensor


def write_raw(file: Path, header: str, data: bytes) -> Path:
    """Write a header, given as text, and bytes."""
    file.write_bytes(len(header.encode()).to_bytes(8, "little") + header.encode() + data)
    return file


def write_safetensors(file: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write a sound file; tied tensors are written several times."""
    # `safetensors.torch` needs NumPy to write, which nothing that is installed beside fxopt-checkpoints brings.
    copies = {key: tensor.detach().clone(memory_format=torch.contiguous_format) for key, tensor in tensors.items()}
    specs = {
        key: TensorSpec(
            dtype=str(each.dtype).removeprefix("torch."),
            shape=each.shape,
            data_ptr=each.data_ptr(),
            data_len=each.nbytes,
        )
        for key, each in copies.items()
    }
    serialize_file(specs, file)
    return file


def write_shards(folder: Path, shards: Mapping[str, Mapping[str, Tensor]], **changes: Any) -> Path:
    """Write a checkpoint in shards, by file; ``changes`` are entries of the index besides or instead."""
    for name, tensors in shards.items():
        write_safetensors(folder / name, tensors)
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps({"weight_map": {key: name for name, keys in shards.items() for key in keys} | changes}))
    return file
