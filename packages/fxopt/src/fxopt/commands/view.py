"""`fxopt view ARCHIVE`: the graph of an archive, and what passes did to it, in the browser."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fxopt.commands.answer import Answer, answer
from fxopt.commands.checks import check_archive
from fxopt.commands.failures import ExitCode, FileError, blaming
from fxopt.commands.one_page import show_once
from fxopt.commands.parameters import ForceOption, JsonOption, PickleOption
from fxopt.commands.terminal import Terminal

ArchiveArgument = Annotated[str, typer.Argument(metavar="ARCHIVE", help="A .fxopt archive.")]
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
        check_archive(archive)
        from fxopt.commands.outputs import check_output, check_reports

        check_reports()
        path = None if output is None else check_output(output, force=force, suffix=".html")
        with terminal.steps(2) as step:
            from fxopt.commands.models.sources import read_archive
            from fxopt_report import report

            step("reading")
            graph_module = read_archive(archive, run_pickled_code=run_pickled_code)
            step("drawing")
            with blaming(ExitCode.FILE):
                page = report(None, graph_module, title=Path(archive).name)
                if path is not None:
                    page.save(path, force=True)
                html = page.html
        if path is None and not show_once(html):
            raise FileError("no browser fetched the page; write it to a file instead: -o FILE.html")
        where = None if path is None else str(path)
        text = f"{page}\n{where or 'shown in the browser'}"
        return Answer({"page": where, "opened": path is None}, lambda terminal: terminal.print(text))

    answer(work, as_json=as_json)
