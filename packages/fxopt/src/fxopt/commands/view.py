"""`fxopt view ARCHIVE`: the graph of an archive, and what passes did to it, in the browser."""

from __future__ import annotations

import tempfile
import webbrowser
from pathlib import Path
from typing import Annotated

import typer

from fxopt.commands.answer import Answer, answer
from fxopt.commands.checks import check_archive
from fxopt.commands.failures import ExitCode, FileError, blaming
from fxopt.commands.parameters import ForceOption, JsonOption
from fxopt.commands.terminal import Terminal

ArchiveArgument = Annotated[str, typer.Argument(metavar="ARCHIVE", help="A .fxopt archive.")]
PageOption = Annotated[
    str | None, typer.Option("--output", "-o", metavar="FILE", help="Write the page here, and open no browser.")
]


def view(
    archive: ArchiveArgument, output: PageOption = None, force: ForceOption = False, as_json: JsonOption = False
) -> None:
    """Show the graph of an archive in the browser.

    The page also shows what passes did to the graph, and needs no network. Without -o, it is in a
    temporary folder.
    """

    def work(terminal: Terminal) -> Answer:
        check_archive(archive)
        from fxopt.commands.outputs import check_output, check_reports

        check_reports()
        if output is None:
            # Not removed at the end, since the browser may read the page later.
            path = Path(tempfile.mkdtemp(prefix="fxopt."), f"{Path(archive).stem}.html")
        else:
            path = check_output(output, force=force, suffix=".html")
        with terminal.steps() as step:
            from fxopt.commands.models.sources import read_archive
            from fxopt_report import report

            step("reading")
            graph_module = read_archive(archive)
            step("drawing")
            with blaming(ExitCode.FILE):
                page = report(None, graph_module, title=Path(archive).name)
                page.save(path, force=True)
        if output is None and not webbrowser.open(path.as_uri()):
            raise FileError(f"no browser can be opened here; open {path} in one, or choose a file with -o FILE.html")
        data = {"page": str(path), "opened": output is None}
        return Answer(data, lambda terminal: terminal.print(f"{page}\n{path}"))

    answer(work, as_json=as_json)
