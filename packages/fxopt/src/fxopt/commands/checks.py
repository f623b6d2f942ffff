"""What is checked before torch is imported: paths, names of factories, and that there is a pipeline at all."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import sys
from pathlib import Path

from fxopt.commands.failures import CommandError, ExitCode, FileError

FACTORY = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")
_EXPECTED = "expected a .pt2 archive, a folder in Hugging Face format, or package.module:factory"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")


def check_pipeline(text: str | None) -> None:
    """Raise if a pipeline is empty."""
    if text is not None and not text.strip():
        message = "the pipeline is empty: name passes or a pipeline; `fxopt list` shows them"
        raise CommandError(message, ExitCode.USAGE, kind="PipelineSyntaxError")


def check_sources(*texts: str, inputs: str | None = None) -> None:
    """Raise if a SOURCE or the file of inputs does not exist."""
    for text in texts:
        if not Path(text).exists() and FACTORY.fullmatch(text):
            _check_module(text)
        else:
            _check_path(text, _EXPECTED)
    if inputs is not None and (not Path(inputs).exists() or Path(inputs).is_dir()):
        close = _close(inputs, (".pt", ".pth", ".safetensors")) or "; expected one of torch.save, or safetensors"
        raise FileError(f"there is no file {inputs!r} with inputs{close}")


def check_archives(*texts: str | None) -> None:
    """Raise if there is no file of the name of an archive."""
    for text in texts:
        if text is not None:
            _check_path(text, "expected a .pt2 archive")
            if Path(text).is_dir():
                raise FileError(f"{text!r} is a directory, and no file; expected a .pt2 archive")


def check_reproducer(text: str) -> None:
    """Raise if there is no such file."""
    if not Path(text).is_file():
        close = _close(text, (".zip",)) or "; expected NUMBER_PASS.reproducer.zip, as `fxopt optimize` writes it"
        raise FileError(f"{text!r} is no reproducer: there is no file of that name{close}")


def no_module(name: str, text: str) -> FileError:
    """Return the error for a factory whose module is not there."""
    where = "with the package installed or in the current folder"
    return FileError(f"there is no module {name!r} for {text}; give package.module:factory, {where}")


def find_in_current_folder() -> None:
    """Let modules of the current folder be imported, as `python -m` does."""
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())


def _check_module(text: str) -> None:
    find_in_current_folder()
    name = text.partition(":")[0].partition(".")[0]
    if name not in sys.modules and importlib.util.find_spec(name) is None:
        raise no_module(name, text)


def _check_path(text: str, expected: str) -> None:
    path = Path(text)
    if path.suffix == ".py" and path.is_file():
        raise FileError(f"{text} is Python source; name the function in it that makes the model: {_in_module(path)}")
    if path.is_fifo() or path.is_socket() or path.is_char_device() or path.is_block_device():
        kind = "a FIFO" if path.is_fifo() else "a socket" if path.is_socket() else "a device"
        raise FileError(f"{text!r} is {kind}, and no file; {expected}")
    if path.exists():
        return
    if _HUB_NAME.fullmatch(text) and not path.parent.is_dir():
        expected += ". Nothing is downloaded: download a model from a hub first (`hf download NAME --local-dir FOLDER`)"
    close = _close(text, (".pt2", ".pt", ".pth", ".py"))
    raise FileError(f"there is no file or folder {text!r}{close or f'; {expected}'}")


def _in_module(path: Path) -> str:
    """Return how to name a function of a file of Python; modules are found in the current folder."""
    inside = "" if path.parent.resolve() == Path.cwd() else f", in the folder {str(path.parent)!r}"
    return f"{path.stem}:FUNCTION{inside}"


def _close(text: str, suffixes: tuple[str, ...]) -> str:
    """Return which files or folders of close names may be meant, as a question, or an empty text."""
    folder, name = Path(text).parent, Path(text).name
    there = (
        [path for path in folder.iterdir() if _is_meant(path, suffixes)]
        if folder.is_dir() and os.access(folder, os.R_OK)
        else []
    )
    names = {path.name: path for path in there}
    close = [key for key, path in names.items() if path.stem == name] or difflib.get_close_matches(name, names, n=3)
    meant = [_in_module(names[key]) if key.endswith(".py") else str(folder / key) for key in close]
    return f"; did you mean {' or '.join(meant)}?" if meant else ""


def _is_meant(path: Path, suffixes: tuple[str, ...]) -> bool:
    return (path / "config.json").is_file() if path.is_dir() else path.suffix in suffixes
