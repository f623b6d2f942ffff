"""Write files in safetensors format, sound ones and broken ones, without the library of that name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


def contents(tensors: Mapping[str, Tensor]) -> tuple[dict[str, Any], bytes]:
    """Return the header of a file as data, and its bytes."""
    header: dict[str, Any] = {}
    data = b""
    for key, tensor in tensors.items():
        flat = tensor.detach().contiguous().flatten()
        values = bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""
        offsets = [len(data), len(data) + len(values)]
        header[key] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        data += values
    return header, data


def write_raw(file: Path, header: str, data: bytes) -> Path:
    """Write a header, given as text, and bytes."""
    text = header.encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return file


def write_safetensors(file: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Write a sound file."""
    header, data = contents(tensors)
    return write_raw(file, json.dumps({"__metadata__": {"format": "pt"}, **header}), data)


def write_shards(folder: Path, shards: Mapping[str, Mapping[str, Tensor]], **changes: Any) -> Path:
    """Write a checkpoint in shards, by file; what the index says of some tensors, or of all, can be changed.

    Args:
        folder: where to.
        shards: the tensors of each file.
        changes: ``total_size``, or ``weight_map``: entries that it has besides or instead; None takes one out.
    """
    weight_map: dict[str, Any] = {key: name for name, tensors in shards.items() for key in tensors}
    total = sum(tensor.numel() * tensor.element_size() for tensors in shards.values() for tensor in tensors.values())
    for name, tensors in shards.items():
        write_safetensors(folder / name, tensors)
    weight_map |= changes.get("weight_map", {})
    index = {
        "metadata": {"total_size": changes.get("total_size", total)},
        "weight_map": {key: name for key, name in weight_map.items() if name is not None},
    }
    file = folder / "model.safetensors.index.json"
    file.write_text(json.dumps(index), encoding="utf-8")
    return file
