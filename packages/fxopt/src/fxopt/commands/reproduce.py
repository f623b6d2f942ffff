"""`fxopt reproduce FILE`: run a failed pass again, on the graph that it failed on."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxopt.commands.answer import Answer, answer
from fxopt.commands.checks import FLAG, check_reproducer
from fxopt.commands.failures import CommandError, ExitCode, FileError
from fxopt.commands.parameters import JsonOption, PickleOption
from fxopt.commands.terminal import Terminal

if TYPE_CHECKING:
    from fxopt_tools import Reproduction

FileArgument = Annotated[
    str, typer.Argument(metavar="FILE", help="A reproducer: NUMBER_PASS.reproducer.zip, as `fxopt optimize` writes it.")
]


def reproduce(file: FileArgument, run_pickled_code: PickleOption = False, as_json: JsonOption = False) -> None:
    """Run a failed pass again on the graph that it failed on.

    The exit code is 9 if it does not fail in the same way. A pass that no installed family offers needs
    --trusted, since its module is imported.
    """

    def work(terminal: Terminal) -> Answer:
        check_reproducer(file)
        with terminal.steps(2) as step:
            from fxopt_core import PreconditionError, RegistryError
            from fxopt_tools import reproduce as run_again

            step("running the pass")
            try:
                found = run_again(file, trusted=run_pickled_code)
            except PreconditionError as error:
                raise FileError(str(error).replace("trusted=True", FLAG)) from error
            except RegistryError as error:
                raise CommandError(f"{file}: {error}", ExitCode.USAGE, kind=type(error).__name__) from error
        code = ExitCode.DONE if found else ExitCode.NOTHING_FOUND
        return Answer(_data(found), lambda terminal: terminal.print(str(found)), code)

    answer(work, as_json=as_json)


def _data(found: Reproduction) -> dict[str, Any]:
    return {
        "verdict": found.verdict,
        "pass": found.pass_name,
        "expected": found.expected,
        "found": found.found,
        "notes": found.notes,
    }
