"""`fxopt export SOURCE`: a model or an archive as a program of torch.export."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import filesize

from fxopt.commands.answer import Answer, answer
from fxopt.commands.checks import check_sources
from fxopt.commands.failures import CommandError, ExitCode, blaming
from fxopt.commands.parameters import ForceOption, InputsOption, JsonOption, PickleOption, SourceArgument
from fxopt.commands.terminal import Terminal

ProgramOption = Annotated[
    str, typer.Option("--output", "-o", metavar="FILE", help="The .pt2 file to write, which torch.export.load reads.")
]


def export(
    source: SourceArgument,
    output: ProgramOption,
    inputs: InputsOption = None,
    force: ForceOption = False,
    run_pickled_code: PickleOption = False,
    as_json: JsonOption = False,
) -> None:
    """Write a model or an archive for torch alone.

    Sizes that vary in the graph vary in the file, which has no history.
    """

    def work(terminal: Terminal) -> Answer:
        check_sources(source, inputs=inputs)
        from fxopt.commands.outputs import check_output

        path = check_output(output, force=force, suffix=".pt2")
        with (
            terminal.steps() as step,
            # Beside the output, so that `replace` stays within one file system and the file appears complete.
            tempfile.TemporaryDirectory(prefix=".fxopt.", dir=path.absolute().parent) as made,
        ):
            import torch

            from fxopt.commands.models.inputs import inputs_for
            from fxopt.commands.models.sources import graph_of, read_source
            from fxopt_capture import CapturedModule, export as export_program
            from fxopt_capture.exporting.failure import first_line

            step("reading")
            model = read_source(source)
            call = inputs_for(model, inputs, run_pickled_code=run_pickled_code)[0]
            step("capturing")
            graph_module = graph_of(model, call)
            step("exporting")
            with blaming(ExitCode.CAPTURE):
                given = () if isinstance(graph_module, CapturedModule) else (call.args, call.kwargs)
                program = export_program(graph_module, *given)
            try:
                torch.export.save(program, Path(made, path.name))
            except Exception as error:  # whatever torch cannot serialize
                message = f"torch.export.save cannot write the program: {type(error).__name__}: {first_line(error)}"
                raise CommandError(message, ExitCode.CAPTURE) from error
            Path(made, path.name).replace(path)
        data: dict[str, Any] = {"output": str(path), "bytes": path.stat().st_size}
        text = f"{path} ({filesize.decimal(data['bytes'])}): torch.export.load reads it"
        return Answer(data, lambda terminal: terminal.print(text))

    answer(work, as_json=as_json)
