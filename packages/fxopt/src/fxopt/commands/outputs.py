"""The file that a command writes: checked before the work begins, without torch, and written at the end."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from fxopt.commands.checks import ARCHIVE, DESCRIBING, downloaded, folders_of_modules, is_hub_name, is_special
from fxopt.commands.failures import ExitCode, FileError, blaming

if TYPE_CHECKING:
    from torch.fx import GraphModule


def check_output(text: str, *, force: bool, suffix: str = ".fxopt") -> Path:
    """Return the path of the file to write, after checking that it may be written.

    Raises:
        FileError: It has another suffix, its folder is not there, or it exists and is to be kept.
    """
    path = Path(text)
    if path.suffix != suffix:
        raise FileError(f"the output {text!r} does not end in {suffix!r}, the format that is written")
    if path.is_dir() or is_special(path):
        kind = "a folder" if path.is_dir() else "a special file"
        raise FileError(f"the output {text!r} is {kind}; give the path of a file")
    if not path.parent.is_dir():
        raise FileError(f"the output {text!r} cannot be written: there is no folder {str(path.parent)!r}")
    if not os.access(path.parent, os.W_OK):
        raise FileError(f"the output {text!r} cannot be written: the folder {str(path.parent)!r} is read-only")
    _check_replaced(path, force)
    return path


def check_reports() -> None:
    """Raise if fxopt-report, which draws reports, is not installed."""
    if find_spec("fxopt_report") is None:
        raise FileError("reports need fxopt-report, which is not installed: pip install 'fxopt[reports]'")


def is_folder_name(text: str) -> bool:
    """Whether an output names a folder: it has no suffix, or ends in a slash.

    >>> is_folder_name("fast"), is_folder_name("v1.5/"), is_folder_name("fast.fxopt")
    (True, True, False)
    """
    return not Path(text).suffix or text.endswith(("/", os.sep))


def check_output_folder(text: str, *, source: str, force: bool) -> Path:
    """Return the path of the folder to write, after checking that it may be written.

    A folder is replaced only if it holds nothing but an archive and files that describe a model and its tokenizer.

    Raises:
        FileError: SOURCE is not a folder in Hugging Face format, or something else is at the path.
    """
    path = Path(text)
    if not is_hub_name(source) and not Path(source, "config.json").is_file():
        raise FileError(
            f"the output {text!r} has no suffix, so it names a folder, but {source} is not a folder in Hugging Face "
            f"format whose files it could hold; give the path of a file, such as {path.name}.fxopt"
        )
    if not path.absolute().parent.is_dir():
        raise FileError(f"the output {text!r} cannot be written: there is no folder {str(path.parent)!r}")
    if path.exists() and not (path / ARCHIVE).is_file():
        raise FileError(f"the output {text!r} exists and was not written by fxopt, so it is kept; give another path")
    kept = (ARCHIVE, *DESCRIBING, *folders_of_modules(path))
    other = next((file for file in path.glob("*") if not any(map(file.match, kept))), None)
    if other is not None:
        raise FileError(f"the output {text!r} holds {other.name!r}, which would be lost; give another path")
    if path.exists() and Path(source).exists() and path.samefile(source):
        raise FileError(f"the output {text!r} is SOURCE; give another path")
    _check_replaced(path, force)
    return path


def _check_replaced(path: Path, force: bool) -> None:
    if path.exists() and not force:
        raise FileError(f"the output {str(path)!r} exists; give another path, or --force to replace it")


def write_graph(graph_module: GraphModule, path: Path) -> int:
    """Save a graph module; a file at the path is replaced only once the new one is complete.

    Args:
        graph_module: the graph module.
        path: the file.

    Returns:
        The size of the file in bytes.

    Raises:
        CommandError: It cannot be saved, or not at this path.
    """
    from fxopt_capture import save
    from fxopt_core import CaptureError

    with blaming(ExitCode.CAPTURE):
        try:
            save(graph_module, path)
        except CaptureError as error:
            if isinstance(error.__cause__, OSError):
                raise FileError(str(error)) from error
            raise
    return path.stat().st_size


def write_folder(graph_module: GraphModule, path: Path, *, source: str, check: Callable[[Path], object]) -> int:
    """Save a graph module in a folder, beside the files of SOURCE that describe the model and its tokenizer.

    A folder at the path is replaced only once the new one is complete.

    Args:
        graph_module: the graph module.
        path: the folder.
        source: SOURCE.
        check: is called with the new folder, before it is at the path; if it raises, nothing is written.

    Returns:
        The size of the archive in bytes.

    Raises:
        CommandError: It cannot be saved, or not at this path.
    """
    from fxopt_capture.huggingface.folders import write_config

    # Beside the path, since a folder is renamed only within a file system; the process number keeps two runs apart.
    folder, former = (path.with_name(f".{path.name}.{os.getpid()}.{word}") for word in ("part", "former"))
    try:
        folder.mkdir()
        origin = Path(source) if Path(source).exists() else downloaded(source)
        for file in (found for pattern in DESCRIBING for found in origin.glob(pattern)):
            # Weights stay out, with the index of their files: nothing is to load the original model by mistake.
            if file.is_file() and not file.name.endswith(".index.json"):
                shutil.copyfile(file, folder / file.name)
        for name in folders_of_modules(origin):
            shutil.copytree(origin / name, folder / name)
        _require_fxopt(folder / "config_sentence_transformers.json")
        _name_tokenizer(origin, folder / "tokenizer_config.json")
        write_config(graph_module, folder)
        size = write_graph(graph_module, folder / ARCHIVE)
        check(folder)
        if path.exists():
            path.rename(former)
        folder.rename(path)
    finally:
        # Only if renaming the new folder failed.
        if former.exists() and not path.exists():
            former.rename(path)
        for left in (folder, former):
            shutil.rmtree(left, ignore_errors=True)
    return size


def _require_fxopt(file: Path) -> None:
    """Have sentence-transformers say that a folder needs fxopt, where fxopt is not installed."""
    if file.is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
        reason = {"specifier": ">=0.1", "reason": "Its transformer is a graph that fxopt has optimized."}
        config["requirements"] = {**config.get("requirements", {}), "fxopt": reason}
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _name_tokenizer(origin: Path, file: Path) -> None:
    """Name the class of SOURCE's tokenizer in a folder: transformers may choose it by the type of the model."""
    from fxopt.commands.models.files import loaded

    tokenizer = loaded("AutoTokenizer", origin)
    if tokenizer is not None:
        config = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
        config["tokenizer_class"] = type(tokenizer).__name__
        file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
