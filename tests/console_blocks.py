"""Examples of the command in documents: blocks of language `console`, as a terminal shows them.

A line that begins with ``$`` is a command, and the lines up to the next one are what it prints, on standard output and
standard error, with ``...`` for what varies. ``fxopt`` runs in this process; ``echo $?`` prints the exit code of the
command before it. Nothing else is understood.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from doctest import OutputChecker

from typer.testing import CliRunner

from fxopt.commands.main import build_app


class Console:
    """Runs the commands of a document, one after the other."""

    def __init__(self) -> None:
        self._app = build_app(plain=True)
        self._code = 0

    def run(self, line: str) -> str:
        """Run a command line; return what it prints."""
        program, *arguments = shlex.split(line, comments=True)
        if [program, *arguments] == ["echo", "$?"]:
            return f"{self._code}\n"
        assert program == "fxopt", f"{line!r} is neither fxopt nor echo $?, and examples run nothing else"
        result = CliRunner().invoke(self._app, arguments)
        self._code = result.exit_code
        return result.output

    def check(self, block: str, where: str, options: int) -> None:
        """Run the commands of a block.

        Raises:
            AssertionError: One prints something else than the block says.
        """
        for line, expected in _commands(block):
            found = self.run(line)
            assert OutputChecker().check_output(expected, found, options), (
                f"{where}: {line!r} prints\n{found}\nand the document says\n{expected}"
            )


def _commands(block: str) -> Iterator[tuple[str, str]]:
    """Yield each command of a block with what it is to print."""
    first, *parts = f"\n{block}".split("\n$ ")
    assert not first.strip() and parts, f"a block of commands begins with '$ ', and this one with {first.strip()!r}"
    for part in parts:
        line, _, output = part.partition("\n")
        yield line, output.rstrip("\n") + "\n" if output.strip() else ""
