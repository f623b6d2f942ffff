"""`fxopt history ARCHIVE`: what was done to a model, and what was refused."""

from __future__ import annotations

from fxopt.commands.answering import Answer, answer
from fxopt.commands.exit_codes import ExitCode
from fxopt.commands.failures import blaming
from fxopt.commands.parameters import ArchiveArgument, JsonOption, PickleOption
from fxopt.commands.terminal import Terminal

_STEPS = {"loading torch": 3.0, "reading": 4.0}


def show_history(archive: ArchiveArgument, run_pickled_code: PickleOption = False, as_json: JsonOption = False) -> None:
    """Show which passes ran on an archive, what they rewrote, and what they left alone and why."""
    answer(lambda terminal: _work(terminal, archive, run_pickled_code), as_json=as_json)


def _work(terminal: Terminal, archive: str, run_pickled_code: bool) -> Answer:
    import json

    with terminal.steps(_STEPS) as step:
        step("loading torch")
        from fxopt.commands.sources import read_archive
        from fxopt_core import history

        step("reading")
        graph_module = read_archive(archive, run_pickled_code=run_pickled_code)
    with blaming(ExitCode.FILE):
        records = history(graph_module)
        return Answer(json.loads(records.to_json()), lambda terminal: terminal.print(str(records)))
