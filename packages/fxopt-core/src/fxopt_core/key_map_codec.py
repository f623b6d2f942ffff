"""A key map as JSON text, and back.

The text is an object: ``{"fxopt_key_map": 1, "originals": [...], "steps": [...], "ties": [...]}``. Settings of
functions are written by `fxopt_core.json_values`; nothing is imported by reading.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, TypeVar

import torch

from fxopt_core.errors import FxoptError
from fxopt_core.json_values import ValueReader, ValueWriter
from fxopt_core.key_map import (
    KEY_MAP_VERSION,
    Assembly,
    Derivation,
    KeyMap,
    NewTensor,
    OriginalTensor,
    Part,
    Step,
    sources_of,
    targets_of,
)
from fxopt_core.ledger_rows import Neutral, Piece

_KEY = "fxopt_key_map"
T = TypeVar("T")


def key_map_to_json(key_map: KeyMap) -> str:
    """Write a key map as text; see `KeyMap.to_json`."""
    return json.dumps(
        {
            _KEY: KEY_MAP_VERSION,
            "originals": [_write_original(row) for row in key_map.originals],
            "steps": [_write_step(step) for step in key_map.steps],
            "ties": [list(group) for group in key_map.ties],
        }
    )


def _write_original(row: OriginalTensor) -> dict[str, Any]:
    written: dict[str, Any] = {"key": row.key, "shape": row.shape, "dtype": _dtype_text(row.dtype), "kind": row.kind}
    written |= {"persistent": row.persistent, "kept": row.kept}
    return written | ({} if row.beside is None else {"beside": row.beside})


def _write_step(step: Step) -> dict[str, Any]:
    if isinstance(step, Assembly):
        parts = [{"source": part.source, **_write_piece(part.piece)} for part in step.parts]
        fills = [{"value": fill.value, **_write_piece(fill.piece)} for fill in step.fills]
        content = {"target": _write_new(step.target), "parts": parts, "fills": fills, "pass": step.pass_name}
        return {"assemble": content}
    write = ValueWriter({}).write
    return {
        "derive": {
            "function": step.function,
            "inputs": dict(step.inputs),
            "settings": {name: write(value) for name, value in step.settings},
            "outputs": [None if output is None else _write_new(output) for output in step.outputs],
            "restore": step.restore,
            "pass": step.pass_name,
        }
    }


def _write_new(tensor: NewTensor) -> dict[str, Any]:
    return {"label": tensor.label, "key": tensor.key, "shape": tensor.shape, "dtype": _dtype_text(tensor.dtype)}


def _write_piece(piece: Piece) -> dict[str, Any]:
    return {"slices": piece.slices, "squeeze": piece.squeeze, "transposed": piece.transposed}


def _dtype_text(dtype: torch.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def key_map_from_json(text: str) -> KeyMap:
    """Read a key map; see `KeyMap.from_json`."""
    try:
        data = _is(dict, json.loads(text))
        version = data.get(_KEY)
        if type(version) is not int or version < 1:
            raise ValueError(f"found no version under {_KEY!r}")
        if version <= KEY_MAP_VERSION:
            return _read(data)
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, FxoptError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise FxoptError(
            f"this key map cannot be read: {what}; expected what KeyMap.to_json wrote, so it was cut off or changed"
        ) from error
    raise FxoptError(
        f"this key map was written by version {version} of its format, and this fxopt reads versions up to "
        f"{KEY_MAP_VERSION}: install a newer fxopt-core"
    )


def _read(data: dict[str, Any]) -> KeyMap:
    originals = tuple(_read_original(row) for row in _is(list, data["originals"]))
    steps = tuple(_read_step(step) for step in _is(list, data["steps"]))
    ties = tuple(tuple(_is(str, key) for key in _is(list, group)) for group in _is(list, data["ties"]))
    _check_names(originals, steps, ties)
    return KeyMap(originals, steps, ties)


def _check_names(
    originals: tuple[OriginalTensor, ...], steps: tuple[Step, ...], ties: tuple[tuple[str, ...], ...]
) -> None:
    known = {row.key for row in originals}
    shapes = {row.key: row.shape for row in originals}
    unknown = [key for group in ties for key in group if key not in known]
    for step in steps:
        unknown += [source for source in sources_of(step) if source not in known]
        known |= {target.label for target in targets_of(step)}
        shapes |= {target.label: target.shape for target in targets_of(step)}
        if isinstance(step, Assembly):
            _check_regions(step, shapes)
    unknown += [row.beside for row in originals if row.beside is not None and row.beside not in known]
    if unknown:
        raise ValueError(f"found `{unknown[0]}`, which is neither an original key nor made by a step before")


def _check_regions(step: Assembly, shapes: Mapping[str, tuple[int, ...] | None]) -> None:
    """Check that regions lie inside of the tensor, and are as large as what fills them."""
    whole = torch.empty(step.target.shape, device="meta")
    for piece, source in (*((p.piece, p.source) for p in step.parts), *((f.piece, None) for f in step.fills)):
        try:
            found = tuple(piece.take(whole).shape)
        except (RuntimeError, IndexError) as error:
            raise ValueError(f"found a region that `{step.target.label}` does not have ({error})") from error
        expected = found if source is None else shapes.get(source, found)
        if found != expected:
            raise ValueError(f"found `{source}` of shape {expected} in a region of shape {found}")


def _read_original(row: dict[str, Any]) -> OriginalTensor:
    kind = row["kind"]
    if kind not in ("parameter", "buffer", "extra-state"):
        raise ValueError(f"found a tensor of kind {kind!r}")
    shape = None if row["shape"] is None else _sizes(row["shape"])
    flags = _is(bool, row["persistent"]), _is(bool, row["kept"])
    return OriginalTensor(_is(str, row["key"]), shape, _dtype(row["dtype"]), kind, *flags, _text(row.get("beside")))


def _read_step(step: dict[str, Any]) -> Step:
    ((kind, content),) = step.items()
    if kind == "assemble":
        target = _read_new(content["target"])
        parts = tuple(Part(_is(str, part["source"]), _piece(target, part)) for part in content["parts"])
        fills = tuple(Neutral(_piece(target, fill), float(fill["value"])) for fill in content["fills"])
        return Assembly(target, parts, fills, _is(str, content["pass"]))
    if kind != "derive":
        raise ValueError(f"found a step of kind {kind!r}")
    read = ValueReader({}).read
    return Derivation(
        function=_is(str, content["function"]),
        inputs=tuple((name, _text(source)) for name, source in content["inputs"].items()),
        settings=tuple((name, read(value)) for name, value in content["settings"].items()),
        outputs=tuple(None if output is None else _read_new(output) for output in content["outputs"]),
        restore=_text(content["restore"]),
        pass_name=_is(str, content["pass"]),
    )


def _read_new(tensor: dict[str, Any]) -> NewTensor:
    return NewTensor(_is(str, tensor["label"]), _text(tensor["key"]), _sizes(tensor["shape"]), _dtype(tensor["dtype"]))


def _piece(target: NewTensor, data: dict[str, Any]) -> Piece:
    triples = [_sizes(triple) for triple in _is(list, data["slices"])]
    slices = tuple((dim, start, length) for dim, start, length in triples)
    squeeze = None if data["squeeze"] is None else _is(int, data["squeeze"])
    return Piece(target.label, slices, squeeze, _is(bool, data["transposed"]))


def _is(kind: type[T], value: Any) -> T:
    if type(value) is not kind:
        raise ValueError(f"found {str(value)[:60]!r}, expected a {kind.__name__}")
    return value


def _text(value: Any) -> str | None:
    return None if value is None else _is(str, value)


def _sizes(value: Any) -> tuple[int, ...]:
    return tuple(_is(int, item) for item in _is(list, value))


def _dtype(name: Any) -> torch.dtype | None:
    found = None if name is None else getattr(torch, _is(str, name))
    if found is not None and not isinstance(found, torch.dtype):
        raise ValueError(f"found {name!r} as dtype")
    return found
