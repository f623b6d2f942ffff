"""Checks before torch is imported, which takes seconds: paths, the kinds of files they lead to, factories.

Whatever passes these checks is checked again, in full, where it is read.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

from fxopt.commands.failures import CommandError, ExitCode, FileError

FLAG = "--trusted"
FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
#: The name of the archive in a folder that `fxopt optimize` writes.
ARCHIVE = "model.fxopt"
#: The files of a folder in Hugging Face format that describe model and tokenizer, and hold no weights.
DESCRIBING = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja", "README.md")
_EXPECTED = (
    "expected a .fxopt archive, a folder in Hugging Face format, owner/name on the Hub, or package.module:factory"
)
# ``owner/name``. A text with the suffix of a model's file is taken for a path that does not exist.
_HUB_NAME = re.compile(r"(?!.*\.(fxopt|pt2|pt|pth|py|safetensors|onnx)$)[\w-][\w.-]*/[\w-][\w.-]*")
_DYNAMIC = re.compile(r"[^\W\d]\w*=\d{1,2}(,\d{1,2})*")


def check_sources(*texts: str, inputs: str | None = None) -> None:
    """Raise if a SOURCE does not exist or clearly holds no model, or if the file of inputs does not exist.

    Args:
        texts: what each SOURCE is given as.
        inputs: the file of inputs, or None.
    """
    for text in texts:
        if Path(text).exists() or not (FACTORY.fullmatch(text) or is_hub_name(text)):
            _check_path(text, _EXPECTED)
    if inputs is not None and (not Path(inputs).exists() or Path(inputs).is_dir()):
        raise FileError(f"there is no file {inputs!r} with inputs; expected a file of torch.save or safetensors")
    for path in (source_path(text) for text in texts if Path(text).exists() or is_hub_name(text)):
        if path.is_dir():
            _check_folder(path)


def check_archive(text: str) -> None:
    """Raise if an archive does not exist."""
    _check_path(text, "expected a .fxopt archive")
    if archive_path(text).is_dir():
        raise FileError(f"{text!r} is a directory, not a file; expected a .fxopt archive, or a folder with one")


def archive_path(text: str) -> Path:
    """Return the path of an archive that is given by its own path, or by the folder that `fxopt optimize` wrote."""
    folder = Path(text)
    is_written = (folder / ARCHIVE).is_file() and (folder / "config.json").is_file()
    return folder / ARCHIVE if is_written else folder


def is_hub_name(text: str) -> bool:
    """Whether a SOURCE that is not a path is the name of a model on the Hub, ``owner/name``."""
    # Where there is a folder of the owner's name, a file in it is meant.
    return not Path(text).exists() and bool(_HUB_NAME.fullmatch(text)) and not Path(text).parent.is_dir()


def source_path(text: str) -> Path:
    """Return the path of a SOURCE that is not a factory; a model on the Hub is downloaded, or found in its cache.

    Raises:
        FileError: It cannot be downloaded.
    """
    return archive_path(str(downloaded(text)) if is_hub_name(text) else text)


@cache
def downloaded(name: str) -> Path:
    """Return the folder that huggingface_hub keeps a model in, with its configuration, tokenizer and safetensors.

    Raises:
        FileError: huggingface_hub is not installed, or cannot download the model and has no copy of it.
    """
    there_is_none = f"there is no file or folder {name!r}, and a model of that name cannot be downloaded"
    try:
        hub = importlib.import_module("huggingface_hub")
    except ImportError as error:
        message = f"{there_is_none}: huggingface_hub is not installed: pip install 'fxopt[transformers]'"
        raise FileError(message) from error
    try:
        # Neither pickles nor code is downloaded.
        patterns = [*DESCRIBING, "*.safetensors", "*.safetensors.index.json"]
        return Path(hub.snapshot_download(name, allow_patterns=patterns))
    except Exception as error:  # what the hub, the network and the cache may raise
        reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
        raise FileError(
            f"{there_is_none} ({type(error).__name__}: {reason}). Where the Hub can be reached, run `hf download "
            f"{name} --local-dir FOLDER`, and give FOLDER"
        ) from error


def folders_of_modules(folder: Path) -> list[str]:
    """Return the folders of the modules of sentence-transformers in a folder; some modules have none.

    Raises:
        FileError: ``modules.json`` is not as sentence-transformers writes it.
    """
    listed = folder / "modules.json"
    if not listed.is_file():
        return []
    try:
        names = [module["path"] for module in json.loads(listed.read_text(encoding="utf-8"))]
    except (ValueError, RecursionError, TypeError, KeyError) as error:
        raise FileError(f"{listed} is not as sentence-transformers writes it: {error!r}") from error
    # The file may be untrusted: `write_folder` copies the folders that it names.
    outside = [name for name in names if not isinstance(name, str) or name != Path(name).name or name == ".."]
    if outside:
        raise FileError(f"{listed} names {outside[0]!r}, expected the name of a folder beside it")
    return [name for name in names if name and (folder / name).is_dir()]


def check_dynamic(texts: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Return the dimensions by input of ``--dynamic NAME=DIMENSION,...``.

    Raises:
        CommandError: A text has another form.

    >>> check_dynamic(["pixel_values=0,2,3"])
    {'pixel_values': (0, 2, 3)}
    """
    found = {}
    for text in texts:
        if not _DYNAMIC.fullmatch(text):
            message = f"--dynamic {text!r} is not NAME=DIMENSION,...; expected, for example, pixel_values=0,2,3"
            raise CommandError(message, ExitCode.USAGE)
        name, _, dimensions = text.partition("=")
        found[name] = tuple(map(int, dimensions.split(",")))
    return found


def _check_path(text: str, expected: str) -> None:
    path = Path(text)
    if path.suffix == ".py" and path.is_file():
        raise FileError(f"{text} is Python source; name the function in it that makes the model: {path.stem}:FUNCTION")
    if is_special(path):
        raise FileError(f"{text!r} is a special file, such as a FIFO or a device; {expected}")
    if not path.exists():
        raise FileError(f"there is no file or folder {text!r}; {expected}")


def _check_folder(folder: Path) -> None:
    """Raise if a folder has no configuration, as `save_pretrained` writes it, or if transformers is not installed."""
    expected = "in Hugging Face format, as save_pretrained writes it"
    odd = next((path for path in folder.iterdir() if is_special(path)), None)
    if odd is not None:
        raise FileError(f"{odd} is a special file, such as a FIFO; expected a folder of files {expected}")
    if not (folder / "config.json").is_file():
        raise FileError(f"{folder} has no config.json; expected a folder {expected}")
    if importlib.util.find_spec("transformers") is None:
        raise FileError(
            f"loading {folder} needs transformers, which is not installed: pip install 'fxopt[transformers]'"
        )


def is_special(path: Path) -> bool:
    """Whether a path is neither a file nor a folder: reading a FIFO waits for a writer, and a device may never end."""
    return path.exists() and not path.is_file() and not path.is_dir()
