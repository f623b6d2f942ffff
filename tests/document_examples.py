"""Runs the examples of a document, one after the other, and compares what they print.

A document is one program: its `python` blocks run in order and in one namespace. A block of language `output` is what
has been printed since the block of that kind before it, with `...` for what varies. Blocks of language `console` are
commands with what they print (see `console_blocks`). A block that cannot run here has `<!-- skip: next -->` before it,
and the reason in words.
"""

from __future__ import annotations

import re
from contextlib import redirect_stdout
from doctest import ELLIPSIS, NORMALIZE_WHITESPACE, OutputChecker
from io import StringIO
from pathlib import Path

import pytest

pytest.importorskip("sybil", reason="the group `documents` of pyproject.toml is not installed")

from console_blocks import Console
from sybil import Document, Example
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser, SkipParser

OPTIONS = ELLIPSIS | NORMALIZE_WHITESPACE


def run(document: Path) -> None:
    """Run the examples of a document; raises what the first wrong one raises."""
    printed = StringIO()

    def check_output(example: Example) -> None:
        found = printed.getvalue()
        expected = re.sub(r"\d+ texts a second", "... texts a second", example.parsed)
        if "no ratio: " in found or "not measured: " in found:  # on a busy machine
            expected = re.sub(r"^.*speed-up.*$", "...", expected, flags=re.MULTILINE)
        assert OutputChecker().check_output(expected, found, OPTIONS), (
            f"{document}, line {example.line}: the examples print\n{found}\nand the document says\n{expected}"
        )
        printed.seek(0)
        printed.truncate()

    commands = Console()

    def check_console(example: Example) -> None:
        commands.check(str(example.parsed), f"{document}, line {example.line}", OPTIONS)

    python, output = PythonCodeBlockParser(doctest_optionflags=OPTIONS), CodeBlockParser("output", check_output)
    console = CodeBlockParser("console", check_console)
    with redirect_stdout(printed):
        for example in Document.parse(str(document), python, output, console, SkipParser()).examples():
            example.evaluate()
