"""`fxopt undo ARCHIVE -o OUT`: take back the last run, or all of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from fxopt.commands.answering import Answer, answer
from fxopt.commands.exit_codes import ExitCode
from fxopt.commands.failures import CommandError, blaming
from fxopt.commands.parameters import ArchiveArgument, ForceOption, JsonOption, OutputOption, PickleOption
from fxopt.commands.terminal import Terminal

if TYPE_CHECKING:
    from torch.fx import GraphModule

AllOption = Annotated[bool, typer.Option("--all", help="Take back all runs, the last one first.")]
_STEPS = {"loading torch": 3.0, "reading": 4.0, "undoing": 0.5, "saving": 8.0}


def undo(
    archive: ArchiveArgument,
    output: OutputOption,
    everything: AllOption = False,
    force: ForceOption = False,
    run_pickled_code: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Take back the last run of an optimized archive, a whole pipeline included, and save what was before.

    Keys, names and values are the original ones, bit for bit.
    """
    answer(lambda terminal: _work(terminal, archive, output, everything, force, run_pickled_code), as_json=as_json)


def _work(
    terminal: Terminal, archive: str, output: str, everything: bool, force: bool, run_pickled_code: bool
) -> Answer:
    from fxopt.commands.outputs import check_output

    path = check_output(output, force=force)
    with terminal.steps(_STEPS) as step:
        step("loading torch")
        from fxopt.commands.graph_data import size_data
        from fxopt.commands.saving import write_graph
        from fxopt.commands.sources import read_archive

        step("reading")
        graph_module = read_archive(archive, run_pickled_code=run_pickled_code)
        before = size_data(graph_module)
        step("undoing")
        undone = take_back(graph_module, everything=everything)
        if not undone:
            raise CommandError(
                f"{archive} has no run to undo; nothing was written", ExitCode.UNDO, kind="NothingToUndo"
            )
        step("saving")
        data = {
            "undone": undone,
            "before": before,
            "after": size_data(graph_module),
            "output": str(path),
            "bytes": write_graph(graph_module, path),
        }
    return Answer(data, lambda terminal: _show(terminal, data))


def take_back(graph_module: GraphModule, *, everything: bool) -> list[str]:
    """Undo the last run of a graph module, or all; return the names of the passes that were undone, the last first.

    Raises:
        CommandError: One of them cannot be undone.
    """
    from fxopt_core import history, undo as undo_last

    names: list[str] = []
    with blaming(ExitCode.UNDO):
        while True:
            applied = _applied(graph_module)
            undo_last(graph_module)
            left = _applied(graph_module)
            names += [history(graph_module)[place].pass_name for place in reversed(applied) if place not in left]
            if left == applied or not everything:
                return names


def _applied(graph_module: GraphModule) -> list[int]:
    from fxopt_core import history

    records = enumerate(history(graph_module))
    return [place for place, record in records if record.state == "applied" and record.changed]


def _show(terminal: Terminal, data: dict[str, Any]) -> None:
    from fxopt.commands.outputs import size_text

    for name in data["undone"]:
        terminal.print(f"undone: {name}")
    counts = f"{data['before']['nodes']} -> {data['after']['nodes']} nodes"
    terminal.print(f"{data['output']} ({size_text(data['bytes'])}): {counts}")
