"""`fxopt history ARCHIVE`: what was done to a model, and what was refused."""

from __future__ import annotations

import json

from fxopt.commands.answer import Answer, answer
from fxopt.commands.checks import check_archives
from fxopt.commands.failures import ExitCode, blaming
from fxopt.commands.parameters import ArchiveArgument, JsonOption, PickleOption
from fxopt.commands.terminal import Terminal


def show_history(archive: ArchiveArgument, run_pickled_code: PickleOption = False, as_json: JsonOption = False) -> None:
    """Show which passes ran on an archive, what they rewrote, and what they left alone and why."""

    def work(terminal: Terminal) -> Answer:
        check_archives(archive)
        with terminal.steps(2) as step:
            from fxopt.commands.sources import read_archive
            from fxopt_core import history

            step("reading")
            graph_module = read_archive(archive, run_pickled_code=run_pickled_code)
        with blaming(ExitCode.FILE):
            records = history(graph_module)
            data = json.loads(records.to_json()) if as_json else {}
            return Answer(data, lambda terminal: terminal.raw(str(records)))

    answer(work, as_json=as_json)
