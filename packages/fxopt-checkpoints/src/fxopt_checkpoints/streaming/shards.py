"""The files of a checkpoint in safetensors format: one file, shards with an index, or a folder with either."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path, PurePath
from typing import Any

from fxopt_checkpoints.streaming.safetensors import (
    StoredTensor,
    check_is_file,
    check_problems,
    distinct_names,
    read_header,
)
from fxopt_checkpoints.tensor_map import listed
from fxopt_core.errors import CheckpointError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LONGEST_INDEX = 100_000_000  # bytes, as the header of a file may have


def stored_tensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name, from the headers of all of its files; see `load_checkpoint`.

    Raises:
        CheckpointError: There is no checkpoint, a file is damaged, or the index does not say what is in the shards.
    """
    found = _found(Path(path))
    return _sharded(found) if found.suffix == ".json" else read_header(found)


def _found(path: Path) -> Path:
    """Return the file or the index that a path means."""
    if not path.is_dir():
        if not path.exists():
            raise CheckpointError(
                f"there is no checkpoint `{path}`; expected a .safetensors file, the index of one in shards, or a "
                "folder that has either"
            )
        return path
    for name in (SINGLE, INDEX):
        if (path / name).is_file():
            return path / name
    files = sorted(os.listdir(path))
    for suffix in (".safetensors.index.json", ".safetensors"):
        fitting = [name for name in files if name.endswith(suffix)]
        if len(fitting) == 1:
            return path / fitting[0]
        if fitting:
            raise CheckpointError(f"`{path}` has several checkpoints ({', '.join(fitting)}): give the path of one")
    others = [name for name in files if name.endswith((".bin", ".pt", ".pth", ".ckpt"))]
    hint = f"; `{others[0]}` holds pickles: load it with torch and use load_original_state_dict" if others else ""
    raise CheckpointError(f"`{path}` has no checkpoint in safetensors format{hint}")


def _sharded(index: Path) -> dict[str, StoredTensor]:
    weight_map, total = _read_index(index)
    problems = [
        f"`{key}`: its shard {str(name)!r:.80} in `{index}` is no name of a file beside it"
        for key, name in weight_map.items()
        if not isinstance(name, str) or PurePath(name).name != name or name in ("", "..")
    ]
    check_problems(problems)
    shards: dict[str, dict[str, StoredTensor]] = {}
    for name in dict.fromkeys(weight_map.values()):
        file = index.parent / name
        if not os.path.exists(file):  # also where the name is too long
            keys = [key for key, each in weight_map.items() if each == name]
            others = f" and {len(keys) - 1} others" if len(keys) > 1 else ""
            problems.append(f"`{keys[0]}`{others}: `{index}` says they are in `{name:.80}`, and there is no such file")
            continue
        try:
            shards[name] = read_header(file)
        except CheckpointError as error:
            problems.append(str(error))
    problems = problems or list(_contradictions(index, weight_map, shards, total))
    check_problems(problems)
    return {key: shards[name][key] for key, name in weight_map.items()}


def _read_index(index: Path) -> tuple[dict[str, Any], Any]:
    """Return what an index says: in which file each tensor is, and how many bytes all of them have, or None."""
    check_is_file(index)
    if index.stat().st_size > _LONGEST_INDEX:
        raise CheckpointError(f"`{index}` is no index of a checkpoint: it has more than {_LONGEST_INDEX} bytes")
    try:
        data = json.loads(index.read_text(encoding="utf-8"), object_pairs_hook=distinct_names)
    except OSError as error:
        raise CheckpointError(f"`{index}` cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"`{index}` is no index of a checkpoint: {error}") from error
    weight_map = data.get("weight_map") if isinstance(data, dict) else None
    if not isinstance(weight_map, dict):
        raise CheckpointError(f"`{index}` is no index of a checkpoint: it has no `weight_map` from names to files")
    metadata = data.get("metadata")
    return weight_map, metadata.get("total_size") if isinstance(metadata, dict) else None


def _contradictions(
    index: Path, weight_map: dict[str, str], shards: dict[str, dict[str, StoredTensor]], total: Any
) -> Iterator[str]:
    """Say in what an index and its shards differ."""
    holders: dict[str, list[str]] = {}
    for name, tensors in shards.items():
        for key in tensors:
            holders.setdefault(key, []).append(name)
    for key, name in weight_map.items():
        found = holders.get(key, [])
        if name not in found:
            where = f"it is in `{found[0]}`" if found else "no shard has it"
            yield f"`{key}`: `{index}` says it is in `{name}`, and {where}"
    for key, names in holders.items():
        if len(names) > 1:
            yield f"`{key}` is in several shards of `{index}`: {listed(sorted(names))}"
        elif key not in weight_map:
            yield f"`{key}` is in `{names[0]}`, and `{index}` does not name it"
    size = sum(each.bytes for tensors in shards.values() for each in tensors.values())
    if total is not None and total != size:
        yield f"`{index}` says that its tensors have {total} bytes, and they have {size}"
