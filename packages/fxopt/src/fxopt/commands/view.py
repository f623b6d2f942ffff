"""`fxopt view ARCHIVE`: the graph of an archive, and what passes did to it, in the browser."""

from __future__ import annotations

import tempfile
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from fxopt.commands.answer import Answer, answer
from fxopt.commands.checks import check_archives
from fxopt.commands.failures import ExitCode, blaming
from fxopt.commands.parameters import ForceOption, JsonOption, PickleOption
from fxopt.commands.terminal import Terminal

ArchiveArgument = Annotated[
    str, typer.Argument(metavar="ARCHIVE", help="A .pt2 archive, written by fxopt or by torch.export.save.")
]
PageOption = Annotated[
    str | None, typer.Option("--output", "-o", metavar="FILE", help="Write the page here, and open no browser.")
]


def view(
    archive: ArchiveArgument,
    output: PageOption = None,
    force: ForceOption = False,
    run_pickled_code: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Show the graph of an archive in the browser.

    The page also shows what passes did to the graph, and needs no network.
    """

    def work(terminal: Terminal) -> Answer:
        check_archives(archive, trusted=run_pickled_code)
        from fxopt.commands.outputs import check_output

        path = None if output is None else check_output(output, force=force, suffix=".html")
        with terminal.steps(2) as step:
            from fxopt.commands.models.sources import read_archive
            from fxopt.reporting import report

            step("reading")
            graph_module = read_archive(archive, run_pickled_code=run_pickled_code)
            step("drawing")
            with blaming(ExitCode.FILE):
                page = report(None, graph_module, title=Path(archive).name)
                if path is None:
                    path = Path(tempfile.mkdtemp(prefix="fxopt-"), f"{Path(archive).stem}.html")
                page.save(path, force=True)
        opened = output is None and webbrowser.open(path.as_uri())
        return Answer({"page": str(path), "opened": opened}, lambda terminal: terminal.print(f"{page}\n{path}"))

    answer(work, as_json=as_json)
