"""Arguments and options that several commands take."""

from __future__ import annotations

from typing import Annotated

import typer

from fxopt.commands.completion import complete_pipeline

SOURCE_HELP = "A .pt2 archive, a folder in Hugging Face format, or package.module:factory."

SourceArgument = Annotated[str, typer.Argument(metavar="SOURCE", help=SOURCE_HELP)]
ArchiveArgument = Annotated[
    str, typer.Argument(metavar="ARCHIVE", help="A .pt2 archive, as `fxopt optimize` saves it.")
]
PipelineOption = Annotated[
    str,
    typer.Option(
        "--pipeline",
        "-p",
        metavar="PIPELINE",
        help="Passes separated by commas, with options in braces, or a named pipeline; `fxopt list` has them.",
        autocompletion=complete_pipeline,
    ),
]
OutputOption = Annotated[str, typer.Option("--output", "-o", metavar="OUT", help="The .pt2 archive to write.")]
ForceOption = Annotated[bool, typer.Option("--force", help="Replace OUT where it exists, without asking.")]
InputsOption = Annotated[
    str | None,
    typer.Option(
        "--inputs",
        metavar="FILE",
        help="Inputs of the model: a file of torch.save, or safetensors. Otherwise those that SOURCE brings, or random "
        "ones of the sizes that it takes.",
    ),
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="Seed of random inputs.")]
RtolOption = Annotated[
    float | None, typer.Option("--rtol", min=0.0, help="Relative tolerance, in place of that of the dtype.")
]
AtolOption = Annotated[
    float | None, typer.Option("--atol", min=0.0, help="Absolute tolerance, in place of that of the dtype.")
]
PickleOption = Annotated[
    bool,
    typer.Option(
        "--run-pickled-code",
        help="Open pickles in files that are named here. A pickle runs whatever code its author put in: only for files "
        "that you trust as you trust a program.",
    ),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print JSON, for scripts.")]
