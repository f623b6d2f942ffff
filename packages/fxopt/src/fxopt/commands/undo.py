"""`fxopt undo ARCHIVE -o OUT`: undo the last run, or all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich import filesize

from fxopt.commands.answer import Answer, answer
from fxopt.commands.checks import check_archive
from fxopt.commands.failures import CommandError, ExitCode, blaming
from fxopt.commands.parameters import ArchiveArgument, ForceOption, JsonOption, OutputOption
from fxopt.commands.terminal import Terminal

if TYPE_CHECKING:
    from torch.fx import GraphModule

AllOption = Annotated[bool, typer.Option("--all", help="Undo all runs, the last one first.")]


def undo(
    archive: ArchiveArgument,
    output: OutputOption,
    everything: AllOption = False,
    force: ForceOption = False,
    as_json: JsonOption = False,
) -> None:
    """Undo the last run of a pass or pipeline on an archive.

    Keys, names and values are the original ones, bit for bit.
    """

    def work(terminal: Terminal) -> Answer:
        check_archive(archive)
        from fxopt.commands.outputs import check_output

        path = check_output(output, force=force)
        with terminal.steps() as step:
            from fxopt.commands.data import size_data
            from fxopt.commands.models.sources import read_archive
            from fxopt.commands.outputs import write_graph

            step("reading")
            graph_module = read_archive(archive)
            before = size_data(graph_module)
            step("undoing")
            undone = last = _undone(graph_module)
            while last and everything:
                last = _undone(graph_module)
                undone = [*undone, *last]
            if not undone:
                message = f"{archive} has no run to undo; nothing was written"
                raise CommandError(message, ExitCode.UNDO, kind="NothingToUndo")
            step("saving")
            size = write_graph(graph_module, path)
            after = size_data(graph_module)
        data = {"undone": undone, "before": before, "after": after, "output": str(path), "bytes": size}
        return Answer(data, lambda terminal: _show(terminal, data))

    answer(work, as_json=as_json)


def _undone(graph_module: GraphModule) -> list[str]:
    """Undo the last run on a graph module; return the names of the undone passes, the last one first."""
    from fxopt_core import history, undo as undo_last

    before = history(graph_module)
    with blaming(ExitCode.UNDO):
        undo_last(graph_module)
    # Undoing changes the states of records, and neither their number nor their order.
    pairs = zip(reversed(before), reversed(history(graph_module)), strict=True)
    return [old.pass_name for old, new in pairs if old.changed and old.state != new.state]


def _show(terminal: Terminal, data: dict[str, Any]) -> None:
    for name in data["undone"]:
        terminal.print(f"undone: {name}")
    counts = f"{data['before']['nodes']} -> {data['after']['nodes']} nodes"
    terminal.print(f"{data['output']} ({filesize.decimal(data['bytes'])}): {counts}")
