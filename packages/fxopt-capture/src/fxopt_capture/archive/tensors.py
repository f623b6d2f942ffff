"""Tensors of an archive: their memory as a file of safetensors, and rows that say where each of them lies in it.

Tensors that share memory share an entry; the entry of any other tensor has its name, dtype and shape, so that any
reader of safetensors finds it.
"""

from __future__ import annotations

import ctypes
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fxopt_capture.archive.container import ALIGNED, Buffer, Container, parsed
from fxopt_core import type_text
from fxopt_core.errors import CaptureError
from fxopt_rewrite import (
    Form,
    InexpressibleError,
    MalformedError,
)

ENTRY = "weights.safetensors"
_NAMES = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "bfloat16": "BF16", "float32": "F32", "float64": "F64",
    "complex64": "C64", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
_UNIT = 16  # bytes, a multiple of the size of every element


@dataclass
class _Memory:
    """A part of a storage that tensors lie in: its address, its size, and their numbers."""

    start: int
    size: int
    tensors: list[int]


class TensorWriter:
    """Collects the tensors of a graph module."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}
        self._tensors: list[Tensor] = []  # the originals, kept alive even if reading an attribute has made them
        self._stored: list[Tensor] = []
        self._keys: list[str] = []

    def number(self, key: str, tensor: Tensor) -> int:
        """Return the number of a tensor, which is written under its first name.

        Raises:
            InexpressibleError: it is not plain.
        """
        if id(tensor) not in self._known:
            self._stored.append(_plain(key, tensor))
            self._known[id(tensor)] = len(self._tensors)
            self._tensors.append(tensor)
            self._keys.append(key)
        return self._known[id(tensor)]

    def finish(self) -> tuple[list[Form], list[Buffer]]:
        """Return a row for each tensor, and the file of safetensors in parts."""
        memories = self._memories()
        sizes = {id(each): each.size % ALIGNED for each in memories}
        # Large ones fill whole units of alignment; the rest is aligned to its elements.
        memories.sort(key=lambda each: (sizes[id(each)] != 0, -self._stored[each.tensors[0]].element_size()))
        # No use of the safetensors library: it keeps no views of shared memory, and maps no file within a file.
        rows: list[Form] = [None] * len(self._tensors)
        header: dict[str, Any] = {}
        offset = 0
        for memory in memories:
            first = self._stored[memory.tensors[0]]
            name = self._keys[memory.tensors[0]]
            dtype, shape = "U8", [memory.size]
            whole = len(memory.tensors) == 1 and first.is_contiguous() and first.nbytes == memory.size
            if whole and _name(first.dtype) in _NAMES:
                dtype, shape = _NAMES[_name(first.dtype)], list(first.shape)
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + memory.size]}
            offset += memory.size
            for number in memory.tensors:
                rows[number] = self._row(number, name, memory)
        text = json.dumps(header, separators=(",", ":")).encode()
        # 8 bytes for the length, the header, and spaces, so that the tensors begin at a multiple of the alignment.
        text += b" " * (-(8 + len(text)) % ALIGNED)
        return rows, [len(text).to_bytes(8, "little"), text, *(self._bytes(memory) for memory in memories)]

    def _row(self, number: int, name: str, memory: _Memory) -> Form:
        tensor, stored = self._tensors[number], self._stored[number]
        row = {
            "entry": name,
            "dtype": _name(stored.dtype),
            "shape": list(stored.shape),
            "stride": None if stored.is_contiguous() else list(stored.stride()),
            "offset": stored.data_ptr() - memory.start if stored.numel() else 0,
            "parameter": isinstance(tensor, nn.Parameter),
            "requires_grad": tensor.requires_grad,
            "device": str(tensor.device) if not tensor.is_cpu else None,
        }
        # What is False, 0 or None is left out, and read as such; a shape is always there, even an empty one.
        return {key: value for key, value in row.items() if value} | {"shape": row["shape"]}

    def _bytes(self, memory: _Memory) -> Buffer:
        if not memory.size:
            return b""
        content: Any = (ctypes.c_char * memory.size).from_address(memory.start)
        content.owners = [self._stored[number] for number in memory.tensors]  # alive as long as this is
        return memoryview(content).cast("B")

    def _memories(self) -> list[_Memory]:
        """Return the memory of the tensors, overlapping ones together."""
        spans = []
        for number, tensor in enumerate(self._stored):
            start, size = (tensor.data_ptr(), _span(tensor) * tensor.element_size()) if tensor.numel() else (0, 0)
            spans.append((start, start + size, number))
        found: list[_Memory] = []
        end = -1
        for start, stop, number in sorted(spans):
            if stop > start and start < end:
                memory = found[-1]
                memory.tensors.append(number)
            else:
                memory = _Memory(start, 0, [number])
                found.append(memory)
                end = stop
            end = max(end, stop)
            memory.size = end - memory.start if stop > start else memory.size
        for memory in found:
            memory.tensors.sort()
            stored = [self._stored[number] for number in memory.tensors]
            if any((each.data_ptr() - memory.start) % each.element_size() for each in stored):
                raise InexpressibleError(f"tensor `{self._keys[memory.tensors[0]]}` shares unaligned memory")
        return found


def _plain(key: str, tensor: Tensor) -> Tensor:
    """Return a tensor on the processor whose memory is to be written."""
    if type(tensor) not in (Tensor, nn.Parameter, nn.Buffer):
        raise InexpressibleError(f"tensor `{key}` is {type_text(tensor)}, a subclass; convert it to a plain tensor")
    if tensor.is_meta:
        raise InexpressibleError(f"tensor `{key}` is on the meta device and has no values; load a checkpoint first")
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_nested:
        raise InexpressibleError(f"tensor `{key}` is sparse, nested or quantized; make it dense (to_dense, dequantize)")
    plain = tensor.detach().resolve_conj().resolve_neg().cpu()
    if any(stride == 0 and size > 1 for stride, size in zip(plain.stride(), plain.shape, strict=True)):
        plain = plain.contiguous()  # one that is expanded would be as large as it likes
    return plain


def _span(tensor: Tensor) -> int:
    """Return the number of elements in memory from the first to the last."""
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


class TensorReader:
    """Reads the tensors of an archive, as views of its mapped file."""

    def __init__(self, container: Container, rows: Sequence[Form]) -> None:
        start, size = container.place(ENTRY)
        memory = container.memory
        length = int.from_bytes(memory[start : start + 8], "little") if size >= 8 else size
        if length > size - 8:
            raise CaptureError(f"{container.name!r} is damaged: {ENTRY} in it is cut off")
        text = bytes(memory[start + 8 : start + 8 + length]).decode()
        self._header = parsed(text, f"{container.name!r} is damaged: {ENTRY} in it")
        self._memory, self._data, self._end = memory, start + 8 + length, start + size
        self._storages: dict[str, torch.UntypedStorage] = {}
        self._rows = rows
        self._made: dict[int, Tensor] = {}

    def __call__(self, number: Form) -> Tensor:
        """Return a tensor by its number; the same one each time."""
        if type(number) is not int or not 0 <= number < len(self._rows):
            raise MalformedError(f"there is no tensor number {number!r:.20}")
        if number not in self._made:
            self._made[number] = self._tensor(self._rows[number])
        return self._made[number]

    def _tensor(self, row: Form) -> Tensor:
        dtype = getattr(torch, row["dtype"], None)
        if not isinstance(dtype, torch.dtype) or dtype.itemsize > _UNIT:
            raise MalformedError(f"{row['dtype']!r:.40} is not a dtype")
        storage, offset = self._storage(row["entry"]), row.get("offset", 0)
        shape, stride = row["shape"], row.get("stride")
        numbers = [offset, *shape, *(stride or ())]
        if any(type(number) is not int or not 0 <= number < 1 << 62 for number in numbers):
            raise MalformedError(f"a tensor has an invalid shape or strides: {shape!r:.60} and {stride!r:.60}")
        steps = torch.empty(shape, device="meta").stride() if stride is None else stride
        empty = 0 in shape
        span = 0 if empty else 1 + sum((size - 1) * step for size, step in zip(shape, steps, strict=True))
        # With a stride of 0, a small file could hold a tensor of any size.
        overlaps = not empty and any(step == 0 and size > 1 for size, step in zip(shape, steps, strict=True))
        if overlaps or offset % dtype.itemsize or offset + span * dtype.itemsize > storage.nbytes():
            raise MalformedError(
                f"a tensor of shape {shape!r:.60} lies beyond the {storage.nbytes()} bytes of its entry"
            )
        if storage.data_ptr() % dtype.itemsize:  # another tool has packed the file: numbers would lie at odd places
            storage = self._storages[row["entry"]] = storage.clone()  # type: ignore[no-untyped-call]
        tensor = torch.empty(0, dtype=dtype).set_(storage, offset // dtype.itemsize, shape, steps)
        if row.get("device") is not None:
            tensor = tensor.to(row["device"])
        if row.get("parameter"):
            return nn.Parameter(tensor, requires_grad=bool(row.get("requires_grad")))
        return tensor.requires_grad_(bool(row.get("requires_grad")))

    def _storage(self, name: str) -> torch.UntypedStorage:
        if name not in self._storages:
            start, stop = self._header[name]["data_offsets"]
            known = type(start) is int and type(stop) is int
            if not known or not 0 <= start <= stop <= self._end - self._data:
                raise MalformedError(f"{name!r:.60} lies beyond the end of {ENTRY}")
            if stop > start:
                place, size = self._data + start, stop - start
                found = torch.frombuffer(self._memory, dtype=torch.uint8, count=size, offset=place)
            else:
                found = torch.empty(0, dtype=torch.uint8)
            self._storages[name] = found.untyped_storage()
        return self._storages[name]
