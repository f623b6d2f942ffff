"""The files of a checkpoint in safetensors format: one file, shards with an index, or a folder with either."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Any

from safetensors import safe_open
from torch import Tensor

from fxopt_core.errors import CheckpointError
from fxopt_rewrite import special_kind

#: The names that ``save_pretrained`` gives; with both in a folder, transformers reads the first, too.
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_LONGEST_INDEX = 100_000_000  # bytes, as the header of a file may have


@dataclass(frozen=True, eq=False)
class StoredTensor:
    """A tensor in a file; ``like`` is on the meta device and has its dtype and shape."""

    key: str
    file: Path
    like: Tensor

    def read(self) -> Tensor:
        """Return the tensor in the mapped memory of its file; do not write to it, and drop it soon.

        Pages read from a mapped file count as memory of the process until it is closed, so each tensor opens its own.

        Raises:
            CheckpointError: Reading fails.
        """
        return _tensor(_open(self.file), self.key, self.file)


def stored_tensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name, from the headers of all of its files; see `load_checkpoint`.

    Raises:
        CheckpointError: There is no checkpoint, a file is damaged, or the index contradicts the shards.
    """
    found = Path(path)
    if found.is_dir():
        found = _in_folder(found)
    elif not found.exists():
        raise CheckpointError(
            f"there is no checkpoint `{path}`; expected a .safetensors file, the index of one in shards, or a folder "
            "that has either"
        )
    return _sharded(found) if found.suffix == ".json" else _of_file(found)


def _in_folder(folder: Path) -> Path:
    for name in (SINGLE, INDEX):
        if (folder / name).is_file():
            return folder / name
    raise CheckpointError(
        f"`{folder}` has neither `{SINGLE}` nor `{INDEX}`: give the path of a .safetensors file or of an index. Load "
        "files of other formats with torch, and use load_original_state_dict"
    )


def _of_file(file: Path) -> dict[str, StoredTensor]:
    opened = _open(file)
    return {key: StoredTensor(key, file, _tensor(opened, key, file).to("meta")) for key in opened.keys()}  # noqa: SIM118  # no mapping


def _open(file: Path) -> Any:
    _check_is_file(file)
    try:
        opened: Any = safe_open(file, framework="pt")
        return opened.__enter__()  # closed when it is dropped
    except OSError as error:
        raise CheckpointError(f"`{file}` cannot be read: {error}") from error
    except Exception as error:  # the library has one of its own, which derives from none
        with file.open("rb") as stream:
            pointer = stream.read(15) == b"version https:/"
        hint = "; it is a pointer of Git LFS to a file that was not fetched: run `git lfs pull`" if pointer else ""
        raise CheckpointError(
            f"`{file}` is not a safetensors file, or it is damaged: {str(error)[:300]}{hint}"
        ) from error


def _tensor(opened: Any, key: str, file: Path) -> Tensor:
    try:
        tensor: Tensor = opened.get_tensor(key)
    except Exception as error:  # the library's own, or torch's for a dtype or a shape that it does not have
        raise CheckpointError(f"`{key:.80}` cannot be read from `{file}`: {str(error)[:300]}") from error
    return tensor


def _check_is_file(file: Path) -> None:
    kind = special_kind(file)
    if kind is not None:  # reading it might never end
        raise CheckpointError(f"`{file}` cannot be read: it is {kind}, expected a file of a checkpoint")


def _sharded(index: Path) -> dict[str, StoredTensor]:
    _check_is_file(index)
    try:
        if index.stat().st_size > _LONGEST_INDEX:
            raise ValueError(f"it has more than {_LONGEST_INDEX} bytes")
        data = json.loads(index.read_text(encoding="utf-8"))
        weight_map = data.get("weight_map") if isinstance(data, dict) else None
        if not isinstance(weight_map, dict):
            raise ValueError("it has no `weight_map` from names to files")
    except OSError as error:
        raise CheckpointError(f"`{index}` cannot be read: {error.strerror or error}") from error
    # json reports deep nesting by a RecursionError.
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"`{index}` is not an index of a checkpoint: {error}") from error
    shards: dict[str, dict[str, StoredTensor]] = {}
    for key, name in weight_map.items():
        # The index may come from a stranger: no name may lead to another folder.
        if not isinstance(name, str) or PurePath(name).name != name or name in ("", ".."):
            raise CheckpointError(
                f"`{key}`: its shard {str(name)!r:.80} in `{index}` is not the name of a file beside it"
            )
        if name not in shards:
            if not os.path.exists(index.parent / name):  # also where the name is too long
                raise CheckpointError(f"`{key}`: `{index}` says it is in `{name:.80}`, and there is no such file")
            shards[name] = _of_file(index.parent / name)
        if key not in shards[name]:
            raise CheckpointError(f"`{key:.80}`: `{index}` says it is in `{name}`, which does not have it")
    return {key: shards[name][key] for key, name in weight_map.items()}
